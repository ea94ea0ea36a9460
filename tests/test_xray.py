"""X-ray panels: what is read from generated code, and the panel on a page."""

import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from project import Project
from triton import knobs

from compiled import limits, sass
from compiled.aot import anywhere
from compiled.machine_code import (
    annotated,
    barrier_before,
    in_place,
    language,
    marks,
)
from compiled.occupancy import occupancy
from compiled.sheets import Sheet
from page import xray
from page.xray import Panel

SCRIPT = "01-double.py"

PTX = """
.version 8.7
.target sm_90a
	.loc	1 7 4
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.relaxed.gpu.global.v2.b32 {%r1, %r2}, [%rd1];
	// begin inline asm
	.loc	1 8 4
	ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
	// end inline asm
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	.loc	2 291 36                        // standard.py:291:36 @[ 01-double.py:9:12 ]
	shfl.sync.bfly.b32 	%r5, %r6, 16, 31, -1;
	.loc	1 10 4
	.loc	2 314 12, function_name $L__info_string0, inlined_at 1 10 4 // standard.py:314:12
	bar.sync 	0;
	.loc	1 11 4
	st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
	st.shared.b32 [ %r1 ], %r2;
	.loc	1 12 4
	bar.sync 	0;
	.loc	1 13 4
	@%p9 atom.global.gpu.release.exch.b32 %r1, [ %rd6 + 0 ], %r2;
	atom.global.gpu.relaxed.add.v4.f32 {%r1}, [%rd1], {%r2};
	griddepcontrol.wait;
	.file	1 "/somewhere/tutorials/01-double.py"
	.file	2 "/somewhere/triton/language/standard.py"
"""  # noqa: E501
KINDS_OF_PTX = [
    ("load", 16, 7),
    ("load", 8, 7),
    ("load", 2, 7),  # not 8: inside inline assembly lines are not counted
    ("copy", 16, 7),
    ("shuffle", 0, 9),
    ("barrier", 0, 10),
    ("store", 16, 11),
    ("barrier", 0, 12),
    ("release", 0, 13),
    ("atomic", 0, 13),
    ("early", 0, 13),
]


def told(found):
    return [(mark.kind, mark.bytes, mark.line) for mark in found]


def test_ptx():
    assert language(PTX) == "ptx"
    found = marks(PTX, SCRIPT)
    assert told(found) == KINDS_OF_PTX
    release = next(mark for mark in found if mark.kind == "release")
    assert barrier_before(found, release.number)
    bare = marks(PTX.replace("12 4\n\tbar.sync 	0;", "12 4\n"), SCRIPT)
    release = next(mark for mark in bare if mark.kind == "release")
    assert not barrier_before(bare, release.number)


def test_sass_has_the_lines_of_its_ptx():
    release = next(m for m in marks(PTX) if m.kind == "release")
    sass = f"""
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	// PTX line 6
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;
	// PTX line 10
        /*0020*/                   LDG.E.U16 R8, desc[UR6][R2.64] ;
        /*0030*/                   STL.64 [R1+0x8], R4 ;
	// PTX line {release.number}
        /*0040*/                   ATOMG.E.EXCH.STRONG.GPU PT, RZ, [R2], R3 ;
"""
    assert told(marks(sass, SCRIPT, PTX)) == [
        ("load", 16, 7),
        ("load", 2, 7),
        ("spill", 8, 7),
        ("release", 0, 13),
    ]


ADD = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry {name}(.param .u64 {name}_p)
{{
    .loc 1 3 1
    .reg .pred %p;
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [{name}_p];
again:
    .loc 1 4 1
    ld.relaxed.gpu.global.b32 %r1, [%rd1];
    add.u32 %r2, %r1, {number};
    .loc 1 5 1
    st.global.b32 [%rd1], %r2;
    setp.lt.u32 %p, %r2, 1000;
    @%p bra again;
    {more}
    ret;
}}
.file 1 "/somewhere/01-double.py"
"""


def test_sass_of_many_kernels_is_that_of_each(tmp_path):
    cubins, expected = [], []
    tools = knobs.nvidia
    long = 300 * ".loc 1 6 1\n st.volatile.global.b32 [%rd1], %r1;\n"
    for name, number, more in (("one", 1, ""), ("two", 2, long), ("x", 3, "")):
        ptx, cubin = tmp_path / f"{name}.ptx", tmp_path / f"{name}.cubin"
        ptx.write_text(ADD.format(name=name, number=number, more=more))
        subprocess.run(
            [tools.ptxas.path, "-lineinfo", "-arch=sm_90a", ptx, "-o", cubin],
            check=True,
        )
        cubins.append(cubin.read_bytes())
        expected.append(
            subprocess.run(
                [tools.nvdisasm.path, "-gp", "-c", "-ndf", cubin],
                check=True, capture_output=True, text=True,
            ).stdout
        )  # fmt: skip
    found = sass.disassembled(cubins, "sm_90a", tools.nvdisasm.path)
    for text, whole in zip(found, expected, strict=True):
        told = list(instructions(text))
        assert told == list(instructions(whole))
        assert len({line for _, line in told}) > 4


def instructions(text):
    """Pairs of name and line of PTX."""
    line = None
    for row in text.splitlines():
        if named := re.search(r"(?:PTX|ptx_txt\",) line (\d+)", row):
            line = named[1]
        if code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+ )?(\S+)", row):
            yield code[2], line


AMD = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	.loc	1 7 4 is_stmt 1                 ; 01-double.py:7:4
	buffer_load_dwordx4 v[2:5], v6, s[24:27], 0
	global_load_short_d16_hi v1, v2, s[0:1]
	.loc	2 314 12                        ; standard.py:314:12 @[ 01-double.py:9:4 ]
	v_add_f32_dpp v0, v0, v0 row_shr:8 row_mask:0xf bank_mask:0xf
	ds_write_b32 v56, v0
	s_barrier
	global_atomic_swap v19, v18, v19, s[2:3] sc0
	buffer_inv sc1
	v_mov_b32_e32 v1, 2
	v_mov_b32_e32 v1, 2
	v_mov_b32_e32 v1, 2
	v_mov_b32_e32 v1, 2
	v_mov_b32_e32 v1, 2
	v_mov_b32_e32 v1, 2
	v_mov_b32_e32 v1, 2
	buffer_store_dwordx2 v[2:3], v6, s[24:27], 0
	buffer_wbl2 sc1
	s_waitcnt vmcnt(0)
	global_atomic_swap v0, v1, s[2:3]
"""  # noqa: E501


def test_amd_assembly():
    found = marks(AMD, SCRIPT)
    assert told(found) == [
        ("load", 16, 7),
        ("load", 2, 7),
        ("shuffle", 0, 9),
        ("barrier", 0, 9),
        ("atomic", 0, 9),
        ("store", 8, 9),
        ("release", 0, 9),
    ]
    assert not barrier_before(found, found[-1].number)


IR = """#loc = loc(unknown)
module {
  tt.func public @f() {
    %x = tt.load %p, %m : tensor<8x!tt.ptr<f16>> loc(#loc3)
    %s = "tt.reduce"(%x) <{axis = 0 : i32}> ({
    ^bb0(%a: f32 loc(#loc), %b: f32 loc(#loc)):
      tt.reduce.return %a : f32 loc(#loc)
    }) : (tensor<8xf32>) -> f32 loc(#loc4)
    ttg.barrier all loc(#loc1)
  } loc(#loc)
} loc(#loc)
#loc1 = loc("/x/01-double.py":7:4)
#loc2 = loc("/x/standard.py":291:36)
#loc3 = loc("x"(#loc1))
#loc4 = loc(callsite(#loc2 at #loc5))
#loc5 = loc("/x/01-double.py":9:4)
"""


def test_ir():
    assert told(marks(IR, SCRIPT)) == [
        ("load", 0, 7),
        ("shuffle", 0, 9),
        ("barrier", 0, 7),
    ]


def test_marks_are_comments_in_the_download():
    script = [f"line {i}" for i in range(1, 20)]
    text = annotated(PTX, marks(PTX, SCRIPT), script)
    assert "[ %rd1 + 0 ];  // <== 16-byte load, line 7: line 7\n" in text
    assert text.count("// <== ") == len(KINDS_OF_PTX)


# target, registers, shared, warps, launch -> warps at a time, limits
OCCUPANCIES = [
    ("sm_90", 32, 0, 8, None, 64, []),
    ("sm_90", 40, 0, 8, None, 48, ["registers"]),
    ("sm_90", 60, 16, 4, (4096, 132), 32, ["registers"]),
    ("sm_90", 128, 0, 16, None, 16, ["registers"]),
    ("sm_90", 32, 100_000, 4, None, 8, ["shared memory"]),
    ("sm_80", 32, 100_000, 4, None, 4, ["shared memory"]),
    ("sm_90", 16, 0, 1, None, 32, ["programs"]),
    ("sm_75", 32, 0, 4, None, 32, []),
    ("sm_90", 240, 49212, 4, (264, 132), 8, ["registers", "the launch"]),
    ("gfx942", 64, 0, 4, None, 32, []),
    ("gfx942", 170, 0, 4, None, 8, ["registers"]),
    ("gfx942", 64, 16384, 4, None, 16, ["shared memory"]),
]


@pytest.mark.parametrize("case", OCCUPANCIES, ids=str)
def test_occupancy(case):
    target, registers, shared, warps, launch, at_a_time, limits = case
    found = occupancy(target, registers, shared, warps, launch)
    assert (found[0], found[2]) == (at_a_time, limits)


ENTRY = """
[01-double]
run = "_double[(M,)](*torch.empty(2, N, dtype=dtype, device=DEVICE), N)"
M = 3
N = [1024, 512]
dtype = "float32"

[01-double.sizes]
float32 = [512]

[01-double._double]
look = "Doubled by 16 bytes."
true.1024 = ["narrow('load') == 0"]
"""


def with_panel(folder, entry=ENTRY):
    project = Project(folder)
    (project.root / "docs/kernels.toml").write_text(entry)
    return project


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    project = with_panel(tmp_path_factory.mktemp("site"))
    project.output = project.build().stdout
    return project


def test_the_columns_are_those_that_the_kernel_got(tmp_path):
    """A kernel for wide rows is launched with the same ones at each N."""
    page = {"N": [1024, 512]}
    for given, named in (
        ((None, None), ["N = 1024", "N = 512"]),
        ((2048, 1024), ["N = 2048", "N = 1024"]),
        ((4096, 4096), ["N = 4096"]),
    ):
        found = {
            ("_f", "sm_90", N): Sheet("_f", "sm_90", got, {"Programs": "3"})
            for N, got in zip(page["N"], given, strict=True)
        }
        panel = Panel(tmp_path, "01-double", page, "_f", {}, found)
        table, ways = panel.tab("sm_90").split("Where lines")
        assert re.findall(r"N = \d+", table) == named
        assert named[0] in ways


def test_the_panel_follows_its_kernel(built):
    assert "build succeeded." in built.output, built.output[-3000:]
    page = built.page()
    assert page.count("X-ray of") == 1
    kernel, panel, after = (
        page.index(text)
        for text in ("a comment</span>", "X-ray of", "The benchmark.")
    )
    assert kernel < panel < after
    text = " ".join(re.sub("<[^>]*>", " ", page[panel:after]).split())
    for part in (
        "Doubled by 16 bytes.",
        f"This is what triton {version('triton')} compiles; the figures of "
        "this page were timed with what triton 3.0.0 compiled.",
        "sm_80 NVIDIA A100 N = 1024 Compiled by triton",
        "sm_90 NVIDIA H200 N = 1024 N = 512 Compiled by triton",
        *(f"{compiled_by(target)} Programs 3" for target in limits.SHOWN),
        "sm_100 NVIDIA B200",
        "gfx942 AMD MI300X",
        "Programs 3 × 4 warps",
        "Global loads 2 × 16 bytes 1 × 16 bytes",
        "Spilled bytes of a thread 0 0",
        "tl.store(y_ptr + cols, 2 * tl.load(x_ptr + cols)) # a comment",
        "PTX ld.global.v4.b32",
        "SASS LDG.E.128",
        "AMD assembly",
    ):
        assert part in text, part


def compiled_by(target):
    """What nvdisasm's neighbors say themselves."""
    said = f"triton {version('triton')}"
    if target == "gfx942":
        return said
    name = "ptxas-blackwell" if target == "sm_100" else "ptxas"
    tool = Path(knobs.nvidia.nvdisasm.path).with_name(name)
    text = subprocess.run([tool, "--version"], capture_output=True, text=True)
    return f"{said}, ptxas {re.search('release ([0-9.]+)', text.stdout)[1]}"


@pytest.mark.parametrize("timed", [(), (version("triton"),)])
def test_figures_of_the_same_compiler_need_no_word(tmp_path, timed):
    assert not Panel(tmp_path, "", {}, "_f", {}, {}, timed).versions()
    assert Panel(tmp_path, "", {}, "_f", {}, {}, (*timed, "3")).versions()


def test_the_panel_is_not_in_the_downloads(built):
    folder = built.root / "docs/tutorials"
    given = (folder / SCRIPT).read_bytes()  # behind a head
    assert given.endswith(built.script().read_bytes())
    assert b"X-ray" not in given
    notebook = json.loads((folder / "01-double.ipynb").read_text())
    assert "X-ray" not in json.dumps(notebook)


def test_the_code_can_be_downloaded(built):
    page = built.page()
    names = re.findall(r'href="(\.\./_downloads/[^"]*_double\.[^"]*)"', page)
    codes = {"sm_80", "sm_90", "sm_100"}
    wanted = {(t, c) for t in codes for c in ("ttir", "ttgir", "ptx")}
    wanted |= {("gfx942", c) for c in ("ttir", "ttgir", "amdgcn")}
    wanted.add(("sm_90", "sass"))
    assert {tuple(name.rsplit(".", 2)[1:]) for name in names} == wanted
    kernel = "tl.store(y_ptr + cols, 2 * tl.load(x_ptr + cols))"
    for name in names:
        text = (built.root / "html/tutorials" / name).read_text()
        marked = [line for line in text.splitlines() if "<== " in line]
        assert any("load" in x and kernel in x for x in marked), name
        assert str(built.root) not in text
        assert "site-packages" not in text


def test_nothing_made_in_one_checkout_names_another(tmp_path, monkeypatch):
    """Each has kernels of its own; also if who builds lets it use others."""
    home, one, two = (tmp_path / name for name in ("home", "one", "two"))
    monkeypatch.setenv("HOME", str(home))
    for root, kernels in (one, None), (two, one / ".cache" / "triton"):
        monkeypatch.delenv("TRITON_CACHE_DIR")
        if kernels:
            monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
        assert "build succeeded." in with_panel(root).build().stdout
        assert (root / ".cache" / "triton").exists() == (root == one)
        pages = (root / "html").rglob("*.*")
        downloads = (root / "docs/tutorials/xray").iterdir()
        made = [path for path in (*pages, *downloads) if path.is_file()]
        assert len(made) > 30
        for path in made:
            assert str(tmp_path).encode() not in path.read_bytes(), path
        monkeypatch.setenv("TRITON_CACHE_DIR", "")
    assert not (home / ".triton").exists()


def test_code_names_no_folder_and_its_own_page():
    """In each form of Triton's; also a folder whose name has a space."""
    for line, kept in (
        ('.file 1 "/a b/x/tutorials/01.py"', '.file 1 "tutorials/s/01-b.py"'),
        ('.file 1 "/a/tutorials/s" "01-a.py"',
         '.file 1 "tutorials/s" "01-b.py"'),
        ('.file\t2 "/b/triton/language/standard.py"',
         '.file\t2 "triton/language/standard.py"'),
        ('#loc = loc("/tutorials/a b/tutorials/t/05-chunks.py":77:0)',
         '#loc = loc("tutorials/s/01-b.py":77:0)'),
        ("// standard.py:1:6 @[ 05-chunks.py:9:12 ]",
         "// standard.py:1:6 @[ 01-b.py:9:12 ]"),
        (".loc 1 7 4\n\t.section .debug_str\n/a/x", ".loc 1 7 4\n"),
    ):  # fmt: skip
        assert anywhere(line, "s/01-b") == kept


FORMS = {"ptx": PTX, "amd": AMD, "ir": IR}


@pytest.mark.parametrize("form", FORMS)
def test_code_gets_the_lines_of_the_page(form):
    """And no other file does; a comment stays in its column."""
    rows = [*range(101, 107), *range(1207, 1300)]
    text = FORMS[form]
    placed, found = in_place(text, marks(text, SCRIPT), SCRIPT, rows)
    assert found == marks(placed, SCRIPT)
    assert told(found) == [
        (kind, bytes, rows[line - 1])
        for kind, bytes, line in told(marks(text, SCRIPT))
    ]
    theirs = r"(?:standard\.py\"?:|\.loc\t2 )\d+"
    assert re.findall(theirs, placed) == re.findall(theirs, text) != []
    first = re.compile(r"\.loc\t1 .*  ;").search
    if form == "amd":
        assert len(first(placed)[0]) == len(first(text)[0])


def kept(project):
    """What is kept of a project's panels, and when it was written."""
    (file,) = (project.root / "docs/_build/xray").iterdir()
    return file, file.stat().st_mtime_ns


def test_sheets_are_kept_while_the_code_is_the_same(built):
    """Prose of the page may change, and move it."""
    before = kept(built)
    built.edit("in its shortest form", "as short\n# as can be")
    built.edit("Double a tensor, and", "Double a vector, and")
    assert "build succeeded" in built.build().stdout
    assert "as short\nas can be" in built.page()
    assert kept(built) == before
    lines = built.script().read_text().splitlines()
    end = next(n for n, line in enumerate(lines, 1) if "tl.store" in line)
    kernel = set(range(end - 3, end + 1))
    for file in (built.root / "docs/tutorials/xray").iterdir():
        text = file.read_text()
        for line, said in re.findall(r"<== .*, line (\d+): (.*)", text):
            assert lines[int(line) - 1].strip() == said
        places = re.findall(rf'{SCRIPT}"?:(\d+)', text)
        assert set(map(int, places)) <= kernel, file
    for old, new in (
        ("2 * tl.load(", "2.5 * tl.load("),
        ("  # a comment", "  # another comment"),
        ("    cols = tl", "    # columns\n    cols = tl"),
    ):
        key = xray._key(built.script(), {})
        built.edit(old, new)
        changed = xray._key(built.script(), {})
        built.edit(new, old)
        assert changed != key, new


def test_sheets_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file, found = tmp_path / "xray" / "01-double.1", {"_f": 1}
    xray._write(file, found)
    assert xray._read(file) == found
    with pytest.raises(OSError), monkeypatch.context() as patch:
        patch.setattr(xray.os, "replace", full_disk)
        xray._write(file, {"_f": 2})
    assert xray._read(file) == found
    newer = file.with_suffix(".2")
    xray._write(newer, found)
    assert list(file.parent.iterdir()) == [newer]


def full_disk(*_):
    raise OSError("No space left on device")


def test_unreadable_sheets_are_made_again(built):
    file, _ = kept(built)
    whole, page = file.read_bytes(), built.page()
    for left in 0, 100:
        file.write_bytes(whole[:left])
        assert xray._read(file) == {}
    (built.root / "doctrees/environment.pickle").unlink()  # read all again
    assert "build succeeded" in built.build().stdout
    assert file.read_bytes() == whole
    assert built.page() == page


def test_a_kernel_that_is_not_there_is_named(tmp_path):
    project = with_panel(tmp_path, ENTRY.replace("._double]", "._triple]"))
    done = project.build()
    assert done.returncode
    assert "_triple" in done.stdout


def test_a_call_that_fails_is_named(tmp_path):
    project = with_panel(tmp_path, ENTRY.replace("(M,)", "(Q,)"))
    done = project.build()
    assert done.returncode
    assert "cannot be compiled for its X-ray" in done.stdout
    assert "01-double" in done.stdout
    assert "name 'Q' is not defined" in done.stdout
