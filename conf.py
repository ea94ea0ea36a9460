"""Settings of the site. Its mechanism lives in ``docs/_ext``."""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from languages import BUILT, CURRENT, ENGLISH  # noqa: E402

# The site ------------------------------------------------------------------
project = "Both Passes"
author = "The Both Passes authors"
copyright = "2026, " + author
language = CURRENT.code
tagline = "GPU kernels in Triton, forward and backward, measured"
# Where the site is published, and the repository that publishes it. GitHub's
# workflow sets both; without a repository nothing links to it or to Colab.
site_url = os.environ.get("SITE_URL", "http://localhost:8000/")
html_baseurl = f"{site_url}{CURRENT.folder}/"
repository = os.environ.get("GITHUB_REPOSITORY", "")

extensions = [
    "sphinx.ext.autosectionlabel",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "sphinxext.opengraph",
    "notfound.extension",
    # our own
    "gallery",
    "page.cards",
    "page.checked",
    "page.code",
    "page.downloads",
    "page.editions",
    "page.feed",
    "page.passports",
    "page.paths",
    "page.formulas",
    "page.head",
    "page.loaded_files",
    "page.markdown",
    "page.module",
    "page.moving",
    "page.pictures",
    "page.search",
    "page.shares",
    "page.solutions",
    "page.templates",
    "page.terms",
    "page.xray",
    "translation.pages",
]
exclude_patterns = ["_build", "_ext", "_extra"]
# The catalogs of docs/locale as gettext reads them: see docs/_ext/translation.
locale_dirs = ["_build/locale"]
gettext_compact = False
# Each section of the tutorials counts from 01: what names them is their path.
suppress_warnings = ["sphinx_gallery.duplicate_filename"]
templates_path = ["docs/_templates"]
nitpicky = True
# A section has a label, ``:ref:`page:heading```.
autosectionlabel_prefix_document = True
root_doc = "index"

# The tutorials -------------------------------------------------------------
# The GPU whose recordings a page shows first.
measured_gpu = "nvidia-h200"
# The page whose kernels are compared on all GPUs: docs/_ext/page/shares.py.
compared_page = "layer-norm/01-layer-norm"

sphinx_gallery_conf = {
    # English runs the tutorials; the others read what it has made of them.
    "examples_dirs": ["../tutorials"] if CURRENT is ENGLISH else [],
    "gallery_dirs": ["tutorials"] if CURRENT is ENGLISH else [],
    "filename_pattern": r"[/\\]\d\d-.*\.py$",
    # Drafts, and a module that a script imports.
    "ignore_pattern": r"(^|[/\\])(_|both_passes\.py$)",
    "copyfile_regex": r"index\.rst",
    "within_subsection_order": "FileNameSortKey",
    "nested_sections": False,
    # Numbers, look and passport of every figure: see docs/_ext.
    "reset_argv": "gallery.begin",
    "reset_modules": ("gallery.reset",),
    "reset_modules_order": "both",
    "image_scrapers": ("gallery.scraper",),
    "capture_repr": (),
    "remove_config_comments": True,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 1e9,
    "backreferences_dir": None,
    # Our own downloads: see docs/_ext/page/downloads.py.
    "download_all_examples": False,
    "notebook_extensions": set(),
    "only_warn_on_example_error": False,
    "notebook_images": True,
}

# The moving picture of the two stages, behind the cell of a function: with up
# to this many rows and programs.
moving_pictures = {
    "tutorials/layer-norm/03-lock": {
        "after": "_add_behind_lock",
        "rows": 16,
        "programs": 4,
    },
}

# What Triton documents, so that its functions link there. From its pages of
# reference, by hand: building needs no network.
intersphinx_mapping = {
    "triton": (
        "https://triton-lang.org/main/",
        str(ROOT / "docs" / "inventories" / "triton.inv"),
    )
}

# HTML ----------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["docs/_static"]
html_css_files = ["site.css"]
html_js_files = [
    (f"{name}.js", {"defer": "defer"})
    for name in ("folds", "languages", "search", "stops")
]
html_favicon = "docs/_static/logo.svg"
html_copy_source = False
html_use_index = False
html_scaled_image_link = False
html_show_sourcelink = False
html_theme_options = {
    "icon_links": [
        {
            "name": "Repository",  # see docs/_ext/page/head.py
            "url": f"https://github.com/{repository}",
            "icon": "fa-brands fa-github",
        }
    ]
    if repository
    else [],
    "header_links_before_dropdown": 6,
    "navbar_persistent": ["languages"] * (len(BUILT) > 1)
    + ["search-button-field"],
    "navigation_with_keys": False,
    "back_to_top_button": False,
    "show_prev_next": True,
    "show_nav_level": 2,
    "collapse_navigation": True,  # of other sections the titles are enough
    # On a narrow screen the side bars are drawers.
    "primary_sidebar_end": ["close-drawer"],
    "secondary_sidebar_items": {
        "tutorials/**[0-9][0-9]-*": ["close-drawer", "page-toc"],
        "tutorials/**index": [],
        "index": [],
        "[!ti4]*": ["close-drawer", "page-toc"],
    },
    "article_footer_items": ["feedback"] if repository else [],
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version", "theme-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
# Beside the tutorials stands their list; other pages need no second menu.
html_sidebars = {
    "tutorials/[0-9]*": ["sidebar-nav-bs"],
    "tutorials/*/*": ["sidebar-nav-bs"],
    "tutorials/index": [],
    "[!t]*": [],
}
html_context = {
    "default_mode": "auto",  # light or dark as the reader's system is
    "repository": repository,
    # The publishing workflow puts the notebooks on a branch of this name.
    "notebooks": f"{repository}/blob/notebooks/{CURRENT.folder}"
    if repository
    else "",
}

# What is found after all other pages, for few readers ask for it, and what
# they may type for what a section says: see docs/_ext/page/search.py. Chinese
# and Japanese stand here where the translations say it in other words.
search_aside = ["add-a-tutorial", "how-it-is-built", "translating"]
search_spellings = [
    ["A GPU in numbers", "H100", "H200"],
    ["16 bits", "bf16", "bfloat16", "half precision", "mixed precision"],
    ["16 bits", "amp", "autocast", "半精度", "混合精度"],
    ["16 bytes", "coalesced", "coalescing", "vectorized"],
    ["coalesced", "合并访存", "コアレスアクセス"],
    ["adds up", "reduction"],
    ["adds up the rows", "parallel reduction"],
    ["atomic_xchg", "atomic_cas"],
    ["backward", "bwd"],
    ["begin anywhere", "unaligned", "misaligned", "not a multiple of"],
    ["ceiling", "roofline", "speed of light"],
    ["both passes", "implement backward"],
    ["columns", "hidden size", "hidden dimension"],
    ["data parallel", "DDP"],
    ["db", "dbeta", "bias gradient"],
    ["device time", "how fast", "benchmark"],
    ["DRAM", "HBM", "global memory", "全局内存", "グローバルメモリ"],
    ["dw", "dgamma", "weight gradient"],
    ["for a model", "into a model", "drop-in"],
    ["formulas", "derivation", "derive", "推导", "導出"],
    ["forward", "fwd"],
    ["fp16", "float16"],
    ["fp32", "float32"],
    ["fp64", "float64"],
    ["host time", "cpu overhead"],
    ["in flight", "latency hiding"],
    ["is it right", "find the error", "gradcheck", "wrong gradient"],
    ["layer norm", "layernorm", "fused layer norm"],
    ["library is better", "slower than PyTorch"],
    ["maximum and sum", "online softmax"],
    ["memory-bound", "compute-bound"],
    ["notebook", "colab"],
    ["profiler", "ncu", "Nsight Compute"],
    ["registers", "register pressure"],
    ["RMS norm", "rmsnorm"],
    ["rotary embedding", "RoPE", "位置埋め込み"],
    ["rule", "autotune", "tuning", "自动调优", "自動チューニング"],
    ["same bits", "deterministic", "nondeterministic", "reproducible"],
    ["same bits", "确定性", "可复现", "可重复性", "決定性", "再現性"],
    ["softmax", "fused softmax"],
    ["several gpus", "分布式训练", "分散学習"],
    ["stays right", "overflow", "numerical stability"],
    ["stays right", "数值稳定性", "数値安定性"],
    [
        "wait forever",
        "waits forever",
        "programs that wait for each other",
        "deadlock",
        "hang",
        "死锁",
        "デッドロック",
    ],
    ["warps", "num_warps"],
    ["where to start", "paths", "prerequisites", "入门", "入門"],
]

# What a shared link shows, beside what docs/_ext/page/head.py says.
ogp_site_url = html_baseurl
ogp_image = "_static/social.png"
ogp_custom_meta_tags = [
    '<meta name="twitter:card" content="summary_large_image" />'
]

# Copy what can be run: no prompts, no output.
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div.highlight-Python pre, div.highlight-console pre"

# A 404 page is shown at any depth, so its links start at the site's root.
notfound_urls_prefix = urlsplit(html_baseurl).path
