"""X-ray panels: what is read from generated code, and the panel on a page."""

import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from project import Project
from triton import knobs

from compiled import kept, limits
from compiled.aot import anywhere
from compiled.declared import Kernel
from compiled.machine_code import (
    annotated,
    barrier_before,
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


def test_an_addition_needs_a_barrier_before_a_release():
    """It is a store to memory as well, and it may be the only one."""
    add = "red.global.gpu.relaxed.add.f32 [%rd1], %r2;"
    turn = "atom.global.gpu.release.exch.b32 %r1, [%rd6], %r2;"
    head = ".version 8.7"
    for lines, ordered in (
        ((add, "bar.sync 0;", turn), True),
        ((add, turn), False),
        (("bar.sync 0;", add, turn), False),
    ):
        found = marks("\n".join([head, *lines]))
        assert barrier_before(found, found[-1].number) == ordered


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


FACTS = """
from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, y = page.torch.empty(2, N, dtype=dtype, device=page.DEVICE)
    page._double[(M,)](x, y, N)


KERNELS = Kernels(
    run=run,
    M=3,
    N=[1024, 512],
    dtype="float32",
    kernels={
        "_double": Kernel(
            look="Doubled by 16 bytes.",
            true=lambda code: [code.narrow("load") == 0],
        ),
    },
)
"""


def with_panel(folder, facts=FACTS):
    project = Project(folder)
    file = project.root / "tests/pages/01-double.py"
    file.parent.mkdir(parents=True)
    file.write_text(facts)
    return project


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    project = with_panel(tmp_path_factory.mktemp("site"))
    # Compiled anew, whatever else this machine has compiled.
    kernels = str(project.root / "kernels")
    project.output = project.build(TRITON_CACHE_DIR=kernels).stdout
    return project


def sheet(columns=None, **numbers):
    numbers = {"programs": 3, "warps": 4, "registers": 32} | numbers
    given = {"spills": 0, "shared": 0, "stages": 3, "counts": []} | numbers
    return Sheet("_f", "sm_90", columns, "triton 3", **given)


def test_the_columns_are_those_that_the_kernel_got():
    """A kernel for wide rows is launched with the same ones at each N."""
    page = SimpleNamespace(N=[1024, 512])
    for given, named in (
        ((None, None), ["N = 1024", "N = 512"]),
        ((2048, 1024), ["N = 2048", "N = 1024"]),
        ((4096, 4096), ["N = 4096"]),
    ):
        found = {
            ("_f", "sm_90", N): sheet(got)
            for N, got in zip(page.N, given, strict=True)
        }
        panel = Panel(page, "_f", "", found)
        table, ways = panel.tab("sm_90").split("Where lines")
        assert re.findall(r"N = \d+", table) == named
        assert named[0] in ways


def test_numbers_of_a_kernel_in_words():
    counts = [("load", 2, 1), ("load", 16, 8), ("release", 0, 1)]
    many = sheet(registers=60, shared=1024, programs=4096, counts=counts)
    found = dict(xray.numbers(many))
    assert found["Programs"] == "4,096 × 4 warps"
    assert found["Global loads"] == "8 × 16 bytes, 1 × 2 bytes"
    assert found["Global stores"] == found["Barriers"] == "none"
    assert found["Atomics"] == 1
    assert found["Shared memory"] == "1,024 bytes"
    assert found["Warps at a time"] == "32 of 64, limited by registers"


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


def test_the_code_can_be_downloaded(built):
    page = built.page()
    names = re.findall(r'href="(\.\./_downloads/[^"]*_double\.[^"]*)"', page)
    codes = {"sm_80", "sm_90", "sm_100"}
    wanted = {(t, c) for t in codes for c in ("ttir", "ttgir", "ptx")}
    wanted |= {("gfx942", c) for c in ("ttir", "ttgir", "amdgcn")}
    wanted.add(("sm_90", "sass"))
    assert {tuple(name.rsplit(".", 2)[1:]) for name in names} == wanted
    lines = built.script().read_text().splitlines()
    for name in names:
        text = (built.root / "html/tutorials" / name).read_text()
        marked = re.findall(r"<== (.*), line (\d+): (.*)", text)
        assert any("load" in mark for mark, _, _ in marked), name
        for _, line, code in marked:
            assert lines[int(line) - 1].strip() == code


def test_nothing_that_was_made_names_a_folder(built):
    assert list((built.root / "kernels/01-double").iterdir())
    pages = (built.root / "html").rglob("*.*")
    downloads = (built.root / "docs/tutorials/xray").iterdir()
    made = [path for path in (*pages, *downloads) if path.is_file()]
    assert len(made) > 30
    for path in made:
        content = path.read_bytes()
        assert str(built.root).encode() not in content, path
        assert b"site-packages" not in content, path


def test_code_names_no_folder():
    for line, left in (
        ('.file\t2 "/b c/triton/language/standard.py"',
         '.file\t2 "triton/language/standard.py"'),
        ('.file 1 "/a/triton/language" "standard.py"',
         '.file 1 "triton/language" "standard.py"'),
        ('#loc = loc("tutorials/s/05-chunks.py":77:0)',) * 2,
        (".loc 1 7 4\n\t.section .debug_str\n/a/x", ".loc 1 7 4\n"),
    ):  # fmt: skip
        assert anywhere(line) == left


def test_what_is_kept_is_whole_and_of_the_page_as_it_is(tmp_path, monkeypatch):
    name = "01-double"
    script, facts = tmp_path / "script.py", tmp_path / "facts.py"
    script.write_text("x = 1")
    facts.write_text(FACTS)
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "xray")
    monkeypatch.setattr(kept.tutorial, "script_of", lambda name: script)
    monkeypatch.setattr(kept.declared, "file_of", lambda name: facts)
    page = SimpleNamespace(kernels={"_f": Kernel("", list)})
    monkeypatch.setattr(kept.declared, "kernels", lambda name: page)
    call = SimpleNamespace(run="run", values={"N": 512}, target="sm_90")

    def write(text="code"):
        kept.write(name, [(call, {"_f": sheet(512, codes={"ptx": text})})])

    assert not kept.fresh(name)
    write()
    found = kept.read(name)
    assert found["_f", "sm_90", 512].codes == {"ptx": "01-double._f.sm_90.ptx"}
    assert (kept.FOLDER / "01-double._f.sm_90.ptx").read_text() == "code"
    assert kept.fresh(name)
    for file in script, facts:
        before = file.read_text()
        file.write_text(before + "\n")
        assert not kept.fresh(name), file
        file.write_text(before)
    with pytest.raises(OSError), monkeypatch.context() as patch:
        patch.setattr(kept.os, "replace", full_disk)
        write("new code")
    assert kept.read(name) == found
    kept.file_of(name).write_bytes(kept.file_of(name).read_bytes()[:100])
    assert not kept.fresh(name)
    write()
    assert kept.fresh(name)
    (kept.FOLDER / "01-double._f.sm_90.ptx").unlink()
    assert not kept.fresh(name)


def test_a_kernel_for_one_gpu(tmp_path, monkeypatch):
    """It has the tab of that one alone, and must be launched for no other."""
    kernels = {"_f": Kernel("", list, only="sm_90"), "_g": Kernel("", list)}
    page = SimpleNamespace(N=[512], M=4, dtype="float16", kernels=kernels)
    tabs = {}
    for name in kernels:
        found = {(name, target, 512): sheet() for target in limits.SHOWN}
        text = Panel(page, name, "", found).text()
        tabs[name] = re.findall("tab-item::.*· (.*)", text)
    assert tabs == {"_f": ["sm_90"], "_g": [*limits.SHOWN]}

    monkeypatch.setattr(kept, "FOLDER", tmp_path / "xray")
    monkeypatch.setattr(kept.declared, "kernels", lambda name: page)
    monkeypatch.setattr(kept, "made_from", lambda name: "")

    def write(target, *launched):
        call = SimpleNamespace(run="run", values={"N": 512}, target=target)
        found = {name: sheet() for name in launched}
        kept.write("01-double", [(call, found)])

    write("sm_90", "_f", "_g")
    write("sm_80", "_g")
    for wrong in ("sm_90", "_g"), ("sm_80", "_f", "_g"):
        with pytest.raises(LookupError, match="_f"):
            write(*wrong)


def full_disk(*_):
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"_double": K', '"_triple": K', "KERNELS (declares|lacks) _"),
        ("(M,)", "(Q,)", "(?s)cannot be compiled for its X-ray.*name 'Q'"),
    ],
)
def test_facts_that_do_not_fit_are_named(tmp_path, old, new, said):
    done = with_panel(tmp_path, FACTS.replace(old, new)).build()
    assert done.returncode
    output = " ".join(done.stdout.split())
    assert re.search(said, output), output[-2000:]
    assert "tests/pages/01-double.py" in output
