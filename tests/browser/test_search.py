"""The search leads to the section that answers, by the way a reader takes."""

import html
import re
from urllib.parse import urlsplit

import pytest
from browser import built
from browser.test_pages import VIEWS
from playwright.sync_api import expect

# What a reader types, and a pattern of the addresses that answer, which are
# the same in all languages.
QUESTIONS = {
    "en": {
        "tensor parallel": r"several-gpus/01-layer-norm",
        "torchrun": r"several-gpus/01-layer-norm.*#ranks",
        # asked in a review of the site
        "race": r"03-lock.html#the-race",
        "atomic": r"02-summing-rows.html#atomic-additions",
        "spill": r"05-chunks.html#backward-registers|#term-spill",
        "welford": r"07-two-sweeps.html#first-change-welford",
        "2**31": r"(10-host-time|02-summing-rows|01-operators).html#",
        "occupancy": r"04-loads-in-flight.html#",
        "rmsnorm": r"0[12]-rms-norm",
        "bf16": r"02-rms-norm-16-bits.html",
        "lock": r"03-lock.html#the-lock",
        "variance": r"07-two-sweeps.html#both-sums-in-one-sweep",
        "dropout": r"fused/02-dropout.html",
        "interpreter": r"how-figures-are-made.html#recorded-or-live|"
        r"02-testing.html",
        "layer normalization": r"01-layer-norm.html$",
        "cuda graph": r"10-host-time.html#pytorch-s-own-cures|cuda-graph",
        # spelled otherwise than on the page, or with more than letters
        "2^31": r"(10-host-time|02-summing-rows).html#",
        "layernorm": r"01-layer-norm.html$",
        "rms norm": r"0[12]-rms-norm",
        "bfloat16": r"02-rms-norm-16-bits.html",
        "deterministic": r"#the-same-bits$|#term-same-bits",
        "same bits": r"#the-same-bits$",
        "races": r"03-lock.html#the-race",
        "tl.atomic_add": r"02-summing-rows.html",
        "atomic_xchg": r"03-lock.html#the-lock",
        "num_stages": r"04-loads-in-flight.html(#third-knob-stages)?$",
        "torch.compile": r"11-every-width.html#|#where-pytorch-or-a-library|"
        r"#how-fast-is-",
        # as one who knows PyTorch asks
        "softmax": r"03-softmax.html$",
        "padding": r"05-chunks.html$",
        "16 bytes": r"06-unaligned-rows.html|03-any-attention.html#any-str",
        "million columns": r"08-shared-rows.html$|05-wide-softmax.html$",
        "launch": r"10-host-time.html#third|08-shared-rows.html#forward",
        "stale": r"how-figures-are-made.html#when-a-recording-is-stale",
        # asked in a second review, of which nine of twenty were answered
        "num_warps": (
            r"04-loads-in-flight.html#second-knob-warps"
            r"|07-two-sweeps.html#how-many-warps"
        ),
        "coalesced": r"01-layer-norm.html#forward-a-row|06-unaligned-rows",
        "autotune": r"11-every-width.html#the-rule|05-chunks.html#a-formula|"
        r"03-tuning.html",
        "mixed precision": r"02-rms-norm-16-bits.html",
        "amp": r"02-rms-norm-16-bits.html|01-operators.html#autocast",
        "H100": r"#two-gpus|#a-gpu-in-one-minute|#a-gpu-in-numbers",
        "A100": r"how-figures-are-made.html#two-gpus",
        "HBM": r"01-layer-norm.html#a-gpu-in-one-minute|#term-",
        "drop-in": r"11-every-width.html$",
        "prerequisites": r"^index.html#(where-to-start|paths)",
        "nan": r"(03|05)-\w*-?softmax.html|04-cross-entropy.html|"
        r"02-testing.html#rows-that-are-special",
        "how to benchmark": r"#device-time|#how-fast-is-it",
        "gradcheck": r"01-layer-norm.html#is-it-right",
        "gradient wrong": r"09-two-passes.html#find-the-error|#is-it-right",
        "online softmax": r"03-softmax.html#one-sweep-for-maximum-and-sum",
        "layer norm backward triton": r"layer-norm/01-layer-norm.html",
        # asked in a third review, of which 16 of twenty were answered
        "wrong device": r"layer-norm/01-layer-norm.html#a-function-to-train|"
        r"10-host-time.html#first-change",
        "atomic_cas": r"03-lock.html#the-lock",
        "kernel hangs": r"(03-lock|08-shared-rows).html|#term-cooperative",
        "add a tutorial": r"add-a-tutorial.html$",
        # asked in a fourth review, of which 16 of twenty were answered: with
        # the words of other libraries
        "dgamma dbeta all_reduce": r"several-gpus/01-layer-norm.html",
        "hidden size not multiple of 8": r"06-unaligned-rows.html|"
        r"11-every-width.html#widths-that-nobody",
        "layernorm backward formula derivation": r"layer-norm/01-layer-norm",
        # of attention, linear layers, testing and tuning; written before
        # anyone looked how the search answers them
        "flash attention": r"attention/0[123]-",
        "grouped query attention": r"03-any-attention.html|#term-grouped",
        "causal mask": r"03-any-attention.html|#term-causal",
        "rope": r"04-rotary.html|#term-rotary",
        "linear layer": r"01-linear.html",
        "split-k": r"01-linear.html|#term-split",
        "swiglu": r"02-swiglu.html",
        "finite differences": r"02-testing.html|#term-finite",
        "tolerance": r"02-testing.html|#is-it-right",
        "mutation testing": r"02-testing.html|#term-mutant",
        "roofline": r"03-tuning.html#roofline|#term-roofline",
        "custom op": r"01-operators.html|#term-custom",
        "graph break": r"01-operators.html|#term-graph-break",
    },
    "zh-cn": {
        "层归一化": r"01-layer-norm.html$",
        "竞态": r"03-lock.html#the-race",
        "锁": r"03-lock.html",
        "屏障": r"03-lock.html",
        "权重梯度": r"02-summing-rows.html",
        "原子加法": r"02-summing-rows.html#atomic-additions",
        "溢出": r"05-chunks.html#backward-registers|#term-spill",
        "方差": r"07-two-sweeps.html|01-layer-norm.html#both-passes",
        "占用率": r"04-loads-in-flight.html#|#term-occupancy",
        "残差流": r"01-rms-norm.html|01-add-layer-norm.html",
        "舍入": r"02-rms-norm-16-bits.html",
        "交叉熵": r"04-cross-entropy.html$",
        "词表": r"04-cross-entropy.html$",
        "张量并行": r"several-gpus/01-layer-norm",
        "CUDA 图": r"10-host-time.html#pytorch-s-own-cures|cuda-graph",
        "主机时间": r"10-host-time.html",
        "dropout": r"fused/02-dropout.html",
        "softmax": r"03-softmax.html$",
        "解释器": r"how-figures-are-made.html#recorded-or-live|"
        r"02-testing.html",
        "填充": r"05-chunks.html$",
        "起点不对齐": r"06-unaligned-rows.html",
        "num_stages": r"04-loads-in-flight.html",
        "2**31": r"(10-host-time|02-summing-rows|02-dropout|08-shared-rows|"
        r"07-two-sweeps|01-operators)",
        # without spaces, as a question is asked
        "CUDA图": r"10-host-time.html#pytorch-s-own-cures|cuda-graph",
        "如何避免死锁": r"08-shared-rows.html#what-if-a-word|#term-coop",
        "什么是占用率": r"#isn-t-that-just-occupancy|#term-occupancy",
        "反向传播公式推导": r"01-layer-norm.html#backward-the-formulas",
        # in other words than the pages
        "原子操作": r"02-summing-rows.html#atomic-additions|#term-atomic",
        "内存带宽": r"#how-many-bytes-must-be-in|#a-gpu-in-num|#term-band",
        "合并访存": r"#term-coalesced|01-layer-norm.html#forward-a-row",
        "混合精度": r"02-rms-norm-16-bits.html|#autocast",
        "可重复性": r"02-summing-rows.html#the-same-bits|#term-same-bits",
        "数值稳定": r"07-two-sweeps|03-softmax|04-cross-entropy",
        "分布式训练": r"several-gpus/01-layer-norm.html$",
        # in English, whose words the sections do not have
        "layer norm": r"01-layer-norm.html$",
        "stale": r"how-figures-are-made.html#when-a-recording-is-stale",
        # of attention, linear layers, testing and tuning
        "不存注意力矩阵": r"attention/01-attention.html",
        "因果注意力": r"03-any-attention.html|#term-causal",
        "分组查询注意力": r"03-any-attention.html|#term-grouped",
        "注意力反向传播": r"attention/0[123]-",
        "旋转位置编码": r"04-rotary.html|#term-rotary",
        "RoPE": r"04-rotary.html|#term-rotary",
        "线性层": r"01-linear.html",
        "两个分块相乘": r"#a-product-of-two-tiles|01-linear.html",
        "split-K": r"01-linear.html|#term-split",
        "SwiGLU": r"02-swiglu.html",
        "门控": r"02-swiglu.html",
        "有限差分": r"02-testing.html|#term-finite",
        "怎样测试内核": r"02-testing.html",
        "变异体": r"02-testing.html|#term-mutant",
        "容差": r"02-testing.html|#is-it-right",
        "自动调优": r"03-tuning.html|#term-autotuning",
        "屋顶线": r"03-tuning.html#roofline|#term-roofline",
        "五个计数器": r"03-tuning.html#five-counters",
        "自定义算子": r"01-operators.html|#term-custom",
        "图断裂": r"01-operators.html|#term-graph-break",
        "激活检查点": r"01-operators.html|#term-activation-checkpointing",
    },
    "ja": {
        "層正規化": r"01-layer-norm.html$",
        "競合状態": r"03-lock.html",
        "ロック": r"03-lock.html",
        "バリア": r"03-lock.html",
        "逆伝播": r"01-layer-norm.html|-backward-pass$",
        "勾配": (
            r"0(1-layer-norm|2-summing-rows|2-testing).html|#term-gradient"
        ),
        "アトミック加算": r"02-summing-rows.html#atomic-additions",
        "スピル": r"05-chunks.html#backward-registers|#term-spill",
        "分散": r"07-two-sweeps.html",
        "占有率": r"04-loads-in-flight.html#|#term-occupancy",
        "残差ストリーム": r"01-rms-norm.html|01-add-layer-norm.html",
        "丸め": r"02-rms-norm-16-bits.html",
        "交差エントロピー": r"04-cross-entropy.html$",
        "語彙": r"04-cross-entropy.html$",
        "テンソル並列": r"several-gpus/01-layer-norm",
        "CUDA グラフ": r"10-host-time.html#pytorch-s-own-cures|cuda-graph",
        "ホスト時間": r"10-host-time.html",
        "ドロップアウト": r"fused/02-dropout.html",
        "softmax": r"03-softmax.html$",
        "インタプリタ": r"how-figures-are-made.html#recorded-or-live|"
        r"02-testing.html",
        "パディング": r"05-chunks.html$",
        "num_stages": r"04-loads-in-flight.html",
        "2**31": r"(10-host-time|02-summing-rows|02-dropout|08-shared-rows|"
        r"07-two-sweeps|01-operators)",
        # without spaces, as a question is asked
        "CUDAグラフ": r"10-host-time.html#pytorch-s-own-cures|cuda-graph",
        "デッドロックを避けるには": r"08-shared-rows.html#what-if-a-word|"
        r"#term-cooperative",
        "占有率とは": r"#isn-t-that-just-occupancy|#term-occupancy",
        "重みの勾配": r"02-summing-rows.html",
        # in other words than the pages
        "アトミック操作": r"02-summing-rows.html#atomic-addit|#term-atomic",
        "メモリ帯域幅": r"#how-many-bytes-must-be-in|#a-gpu-in-num|#term-band",
        "コアレスアクセス": r"#term-coalesced|01-layer-norm.html#forward-a",
        "混合精度": r"02-rms-norm-16-bits.html|#autocast",
        "再現性": r"02-summing-rows.html#the-same-bits|#term-same-bits",
        "数値安定性": r"07-two-sweeps|03-softmax|04-cross-entropy",
        "分散学習": r"several-gpus/01-layer-norm.html$",
        # in English, whose words the sections do not have
        "layer norm": r"01-layer-norm.html$",
        "stale": r"how-figures-are-made.html#when-a-recording-is-stale",
        # of attention, linear layers, testing and tuning
        "行列を作らないアテンション": r"attention/01-attention.html",
        "因果アテンション": r"03-any-attention.html|#term-causal",
        "グループ化クエリアテンション": r"03-any-attention.html|#term-grouped",
        "アテンションの逆伝播": r"attention/0[123]-",
        "回転埋め込み": r"04-rotary.html|#term-rotary",
        "RoPE": r"04-rotary.html|#term-rotary",
        "線形層": r"01-linear.html",
        "行列積のタイル": r"01-linear.html|#a-product-of-two-tiles",
        "split-K": r"01-linear.html|#term-split",
        "SwiGLU": r"02-swiglu.html",
        "ゲート": r"02-swiglu.html",
        "有限差分": r"02-testing.html|#term-finite",
        "カーネルのテスト方法": r"02-testing.html",
        "ミュータント": r"02-testing.html|#term-mutant",
        "許容誤差": r"02-testing.html|#is-it-right",
        "自動チューニング": r"03-tuning.html|#term-autotuning",
        "ルーフライン": r"03-tuning.html#roofline|#term-roofline",
        "5 つのカウンタ": r"03-tuning.html#five-counters",
        "カスタム演算子": r"01-operators.html|#term-custom",
        "グラフブレイク": r"01-operators.html|#term-graph-break",
        "活性化チェックポイント": r"01-operators.html|"
        r"#term-activation-checkpointing",
    },
}

# Of headings of other sites (Modal's glossary, AMD's, Triton's tutorials) and
# of what users ask in forums. They were written, and their answers judged by
# the words of the pages, before anyone looked how the search answers them.
FROM_ELSEWHERE = {
    "memory-bound": r"01-layer-norm.html#what-limits-layer-norm",
    "register pressure": r"05-chunks.html#backward-registers|"
    r"01-layer-norm.html#backward-a-buffer|01-rms-norm.html#backward-16384",
    "latency hiding": r"04-loads-in-flight.html",
    "vectorized load": r"06-unaligned-rows.html|01-layer-norm.html#forward-a|"
    r"#term-vectorized",
    "streaming multiprocessor": r"01-layer-norm.html#a-gpu-in-one-minute",
    "parallel reduction": r"02-summing-rows.html|"
    r"layer-norm/01-layer-norm.html#backward-a-buffer",
    "fused softmax": r"03-softmax.html",
    "low-memory dropout": r"02-dropout.html",
    "persistent kernel": r"layer-norm/01-layer-norm.html#backward-a-buffer|"
    r"04-loads-in-flight.html#first-knob-programs|01-linear.html#the-ladder",
    "how to implement backward": r"layer-norm/01-layer-norm.html",
    "slower than pytorch": r"#where-pytorch-or-a-library-is-better|"
    r"10-host-time.html",
    "cpu overhead": r"10-host-time.html",
    "large vocabulary": r"04-cross-entropy.html",
    "nondeterministic": r"#the-same-bits$|02-summing-rows.html#atomic-addi",
    "deadlock": r"03-lock.html|08-shared-rows.html",
    "torch.autograd.Function": r"01-layer-norm.html#a-function-to-train-with",
    "nsight compute": r"01-layer-norm.html#what-comes-from-dram|"
    r"04-loads-in-flight.html#(third-knob|counted)|#term-profiler",
    "numerical stability": r"03-softmax|07-two-sweeps|04-cross-entropy",
    "replace nn.LayerNorm": r"11-every-width.html",
    "all-reduce": r"several-gpus/01-layer-norm.html",
}


def ask(page, words):
    """Type words into the open dialog: where the sections found are."""
    said = page.locator("#bp-found-count")
    said.evaluate("element => element.textContent = ''")
    page.locator("#pst-search-dialog input").fill(words)
    expect(said).not_to_be_empty()
    links = page.locator("#bp-found a")
    found = links.evaluate_all("links => links.map(link => link.href)")
    return [
        parts.path.removeprefix(built.prefix())
        + f"#{parts.fragment}" * bool(parts.fragment)
        for parts in map(urlsplit, found)
    ]


@pytest.fixture
def opened(page, view):
    """The front page, with the dialog open."""
    page.goto("index.html")
    page.keyboard.press("Control+k")
    expect(page.locator("#pst-search-dialog input")).to_be_focused()
    return page


def title(name, folder):
    """The title of a page; its soup would take a second to make."""
    text = (built.WHOLE / folder / name).read_text(encoding="utf-8")
    return html.unescape(re.search(r"<h1>(.*?)<a", text)[1])


@pytest.mark.parametrize("folder", QUESTIONS)
def test_questions_are_answered(page, folder):
    """The right section is among the first three."""
    page.goto(f"../{folder}/index.html")
    page.keyboard.press("Control+k")
    expect(page.locator("#pst-search-dialog input")).to_be_focused()
    questions = QUESTIONS[folder] | {
        title(name, folder): f"{re.escape(name)}$" for name in built.TUTORIALS
    }
    found = {words: ask(page, words)[:3] for words in questions}
    wrong = {
        words: found[words]
        for words, wanted in questions.items()
        if not any(re.search(wanted, address) for address in found[words])
    }
    assert not wrong, "\n".join(f"{w}: {wrong[w]}" for w in wrong)


def test_most_questions_from_elsewhere_are_answered(opened):
    found = {words: ask(opened, words)[:3] for words in FROM_ELSEWHERE}
    wrong = {
        words: found[words]
        for words, wanted in FROM_ELSEWHERE.items()
        if not any(re.search(wanted, address) for address in found[words])
    }
    assert len(wrong) <= 2, "\n".join(f"{w}: {wrong[w]}" for w in wrong)


FOR_AUTHORS = r"^(add-a-tutorial|how-it-is-built|translating)\.html"


def test_pages_for_authors_come_last(opened):
    found = ask(opened, "benchmark")
    authors = [bool(re.search(FOR_AUTHORS, address)) for address in found]
    assert any(authors)
    assert authors == sorted(authors)


def test_one_term_of_the_glossary_comes_before_sections(opened):
    found = ask(opened, "memory")
    terms = ["#term-" in a for a in found if not re.search(FOR_AUTHORS, a)]
    assert terms
    if True in terms:
        terms.remove(True)
    assert terms == sorted(terms)


def test_a_formula_leaves_words(opened):
    """The prose says: in place of x - mean it multiplies by rstd ..."""
    found = ask(opened, "Each element of rstd")
    excerpts = opened.locator("#bp-found .bp-words").all_inner_texts()
    assert found
    assert not re.search(r"\bof ,|where is rstd", " ".join(excerpts))


@pytest.mark.parametrize(
    ("folder", "words"), [("zh-cn", "CUDA图"), ("ja", "CUDAグラフ")]
)
def test_chinese_and_japanese_are_shown_as_written(page, folder, words):
    """The index has a space beside each of their characters."""
    page.goto(f"../{folder}/index.html")
    page.keyboard.press("Control+k")
    ask(page, words)
    shown = page.locator("#bp-found").inner_text()
    assert not re.search("[\u3000-\u9fff] [\u3000-\u9fff]", shown)
    marked = page.locator("#bp-found mark").all_inner_texts()
    assert {words[:4], words[4:]} == set(marked)


@pytest.mark.parametrize("words", ["qzxqzx", "collateral", "catastrophic"])
def test_what_no_page_has_is_said(opened, words):
    """Pagefind would answer with sections that have "cols" or "c"."""
    assert ask(opened, words) == []
    said = opened.locator("#bp-found-count")
    expect(said).to_have_text(f"No section has this: {words}")
    assert said.get_attribute("role") == "status"  # is read out
    elsewhere = opened.locator("#bp-found-elsewhere a")
    assert elsewhere.count() == 1 + ("glossary.html" in built.PAGES)
    opened.keyboard.press("ArrowDown")
    expect(elsewhere.first).to_be_focused()
    elsewhere.last.click()
    opened.wait_for_url("**/tutorials/index.html")


def test_a_part_of_a_question_is_answered(opened):
    """Of each word the best section, and it is said."""
    both = ask(opened, "lock colab")
    said = opened.locator("#bp-found-count")
    expect(said).to_contain_text("a part of it: lock colab")
    expect(opened.locator("#bp-found-elsewhere")).to_be_visible()
    assert both[:2] == [ask(opened, word)[0] for word in ("lock", "colab")]
    expect(opened.locator("#bp-found-elsewhere")).to_be_hidden()


def test_a_click_lands_on_the_marked_word(opened):
    ask(opened, "races")  # the page says "race"
    opened.locator("#bp-found a[href$='#the-race']").click()
    opened.wait_for_url("**/03-lock.html?found=races#the-race")
    marked = "[...CSS.highlights.get('found')]"
    assert opened.evaluate(f"{marked}.map(String)[0].toLowerCase()") == "race"
    box = f"{marked}[0].getBoundingClientRect()"
    assert opened.evaluate(f"{box}.top >= 0 && {box}.bottom <= innerHeight")
    inside = f"{marked}.every(range => range.startContainer.parentElement"
    assert opened.evaluate(f"{inside}.closest('section').id === 'the-race')")


LOOK = "CSS.highlights.get('found')?.values().next().value"


def test_another_spelling_is_marked(page):
    """Which the code spreads over pieces of several colors."""
    page.goto("tutorials/layer-norm/02-summing-rows.html")
    page.keyboard.press("Control+k")
    ask(page, "2^31")
    page.locator("#bp-found a[href$='#forward-the-kernel']").first.click()
    page.wait_for_url("**found=2**")
    assert page.evaluate(f"String({LOOK})") == "2**31"


def test_what_is_folded_opens_for_a_word_that_stands_nowhere_else(page):
    name = next(n for n in built.TUTORIALS if n.endswith("01-layer-norm.html"))
    solution = built.soup(name).select_one("details.bp-solution")
    section = solution.find_parent("section")
    code = set(re.findall(r"[a-z]{4,}", solution.pre.get_text()))
    solution.extract()
    seen = section.get_text().lower()
    section.append(solution)  # the soup is kept
    word = min(word for word in code if word not in seen)
    page.goto(f"{name}?found={word}#{section['id']}")
    assert page.evaluate(f"String({LOOK}).toLowerCase()") == word
    expect(page.locator("details.bp-solution").first).to_have_attribute(
        "open", ""
    )
    # Where it is seen without, a reader who tries first is not disturbed.
    word = max((word for word in code if word in seen), key=len)
    page.goto(f"{name}?found={word}#{section['id']}")
    assert page.evaluate(f"String({LOOK}).toLowerCase()") == word
    expect(page.locator("details.bp-solution[open]")).to_have_count(0)


def test_keys_lead_through_the_list_and_back(opened):
    ask(opened, "lock")
    links = opened.locator("#bp-found a")
    opened.keyboard.press("ArrowDown")
    expect(links.nth(0)).to_be_focused()
    opened.keyboard.press("ArrowDown")
    expect(links.nth(1)).to_be_focused()
    opened.keyboard.press("ArrowUp")
    opened.keyboard.press("ArrowUp")
    expect(opened.locator("#pst-search-dialog input")).to_be_focused()
    opened.keyboard.press("Escape")
    expect(opened.locator("#pst-search-dialog")).to_be_hidden()
    opened.keyboard.press("Control+k")
    first, *_ = ask(opened, "lock")
    opened.keyboard.press("Enter")
    opened.wait_for_url(f"**/{first.partition('#')[0]}?**")


@pytest.mark.parametrize("view", [VIEWS["phone"]], ids=["phone"])
def test_search_on_a_phone(page, view):
    page.goto("index.html")
    page.locator(".search-button__button:visible").click()
    ask(page, "lock")
    dialog = page.locator("#pst-search-dialog")
    box = dialog.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert box["y"] + box["height"] <= 844
    sideways = "element => element.scrollWidth - element.clientWidth"
    assert page.locator("#bp-found").evaluate(sideways) == 0
    page.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()


def test_a_page_opened_as_a_file_says_what_to_do(page):
    page.goto((built.SITE / "index.html").as_uri())
    page.keyboard.press("Control+k")
    said = page.locator("#bp-found-count")
    expect(said).to_contain_text("make serve")


def test_a_page_loads_nothing_of_the_search_before_it_is_asked(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto("index.html")
    page.wait_for_load_state("networkidle")
    names = [urlsplit(url).path.rpartition("/")[2] for url in asked]
    assert "search.js" in names
    unwanted = r"pagefind|search\.css|searchtools|searchindex|language_data"
    assert [url for url in asked if re.search(unwanted, url)] == []
    # Also where no focus says that a reader is about to ask.
    field = page.locator("#pst-search-dialog input")
    field.evaluate("field => field.dispatchEvent(new Event('input'))")
    expect(page.locator("#bp-search-style")).to_be_attached()
