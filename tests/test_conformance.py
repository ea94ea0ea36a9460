"""Every page holds what its operation asks and what it declares of itself.

All of a page, with its own tests: pytest --page layer-norm/01-layer-norm
In Triton's interpreter, or on a GPU, where more cases are at full size.
"""

import pytest
import torch

from conformance import on_gpu
from conformance.operation import describe, leaves, run
from conformance.page_files import loader, pages

try:
    import hypothesis
    from hypothesis import strategies as st
except ModuleNotFoundError:  # a GPU machine may lack it
    hypothesis = None

ON_GPU = torch.cuda.is_available()
PAGES = pages()


def each(of, name=str, marks=()):
    """Parametrize: page and one of what of(page) gives; see --page."""

    def parameter(page, one):
        text = f"{page.name}:{name(one)}"
        group = pytest.mark.page(page.name)
        return pytest.param(page, one, id=text, marks=[group, *marks])

    return [
        parameter(page, one) for page in PAGES.values() for one in of(page)
    ]


def both(of):
    return pytest.mark.parametrize(("page", "one"), of)


# The first rows of a table have most of its pairs, 84 to 100 of 100. On a GPU
# all are fast; in the interpreter the others are tried every night.
ROWS = None if ON_GPU else 40
TABLES = {name: page.table(ON_GPU) for name, page in PAGES.items()}


def cases(page):
    """Each case once; on a GPU forms are one."""
    return dict.fromkeys((*TABLES[page.name][:ROWS], *page.cases))


def long_cases(page):
    usual = cases(page)
    every = dict.fromkeys((*TABLES[page.name], *page.long_cases))
    return [case for case in every if case not in usual]


@both(each(cases, describe) + each(long_cases, describe, [pytest.mark.long]))
def test_case(page, one):
    run(page, one, page.load(one.form))


@both(each(lambda p: p.mistakes + p.operation.mistakes(), lambda m: m.words))
def test_mistakes_are_named(page, one):
    module = page.load()

    def ones(*shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype, device=module.DEVICE)

    for function in page.functions.values():
        with pytest.raises(one.error, match=one.words):
            function(module)(*one.arguments(ones), **one.options)


@both(each(lambda p: p.functions))
def test_second_derivative_is_refused_or_right(page, one):
    module = page.load()
    function = page.functions[one](module)
    if page.second_derivative is None:
        page.operation.second_derivative(function, module.DEVICE)
        return
    y, x = page.operation.refusable(function, module.DEVICE)
    loss = y.square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=page.second_derivative):
        dx.sum().backward()


def of_a_sum(page, one):
    """y and s of leaves x and residual."""
    module, operation = page.load(), page.operation
    case = operation.Case(function=one)
    tensors = operation.tensors(case, module.DEVICE)
    x, residual = leaves([tensors["x"], tensors["residual"]], 2 * (True,))
    function = page.functions[one](module)
    return x, residual, function(x, residual, case.shape, None)


def sums(page):
    """Functions of x and a residual, which give their sum, too."""
    named = page.operation.named
    alone = page.operation.alone
    return page.functions if "residual" in named and not alone else ()


SUMS = each(sums)


@both(SUMS)
def test_a_sum_that_changes_before_the_backward_pass(page, one):
    """s is kept for it: overwriting it must be an error."""
    _, _, (y, s) = of_a_sum(page, one)
    with torch.no_grad():
        s += 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


@both(SUMS)
def test_leaves_do_not_share_their_gradient(page, one):
    """x and residual get the same one: who clips it must not clip both."""
    x, residual, (y, s) = of_a_sum(page, one)
    (y.square().sum() + s.sum()).backward()
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before) and before.any()


@both(
    each(
        lambda p: [(n, form) for n in p.repeatable for form in p.forms],
        lambda one: "-".join(filter(None, one)),
    )
)
def test_same_bits_twice(page, one):
    name, form = one
    module = page.load(form)
    case = page.operation.usual(function=name, form=form)
    tensors = page.operation.tensors(case, module.DEVICE)
    function = page.function(case, module)
    first, again = (
        page.operation.results(function, case, tensors) for _ in "12"
    )
    for key, value in first.items():
        assert torch.equal(value, again[key]), f"{key} differs"


@both(each(lambda p: [""] * bool(p.prints), lambda _: "alone"))
def test_the_script_prints(page, one, output):
    assert {words: output.count(words) for words in page.prints} == page.prints


@both(each(lambda p: p.mutants, marks=[pytest.mark.cpu]))
def test_mutants_fail(page, one):
    """A fault that is planted in the page is noticed; -s prints by what."""
    by = killed_by(page, page.mutants[one])
    print(f"\n{page.name} | {one} | {by or 'SURVIVED'}")
    assert by, f"nothing notices: {one}"


def killed_by(page, edit):
    """The step that notices an edit, and what it says; or None."""
    edits = edit if isinstance(edit[0], tuple) else (edit,)
    load = loader(page, edits)
    for step in page.kills:
        try:
            take(page, step, load)
        except (AssertionError, RuntimeError) as error:
            name = step.__name__ if callable(step) else describe(step)
            said = str(error).strip().splitlines() or [type(error).__name__]
            return f"{name} | {said[0][:100]}"
    return None


def take(page, step, load):
    if callable(step):
        step(load)
    else:
        run(page, step, load(step.form))


@both(
    each(
        lambda p: [step for step in p.kills if p.mutants],
        lambda s: s.__name__ if callable(s) else describe(s),
    )
)
def test_what_notices_mutants_passes(page, one):
    take(page, one, loader(page))


if hypothesis:

    @pytest.mark.long
    @both(each(lambda p: [""], lambda _: "random"))
    def test_random_cases(page, one):
        operation = page.operation
        axes = {
            "function": tuple(page.functions),
            "form": ("",) if ON_GPU else tuple(page.forms),
            **operation.axes(ON_GPU),
            **operation.random_axes(),
        }
        values = {
            axis: of if not isinstance(of, tuple) else st.sampled_from(of)
            for axis, of in axes.items()
        }
        rows = st.fixed_dictionaries(values).map(operation.case)

        @hypothesis.settings(
            max_examples=hypothesis.settings().max_examples // 4,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(
            rows.filter(lambda case: operation.possible(case, ON_GPU))
        )
        def holds(case):
            run(page, case, page.load(case.form))

        holds()


# On a GPU ------------------------------------------------------------------

GPU = pytest.mark.gpu


@both(each(lambda p: p.full, describe, [GPU]))
def test_full_size(page, one):
    run(page, one, page.load())


@both(each(lambda p: p.repeated, describe, [GPU]))
def test_same_bits_100_times(page, one):
    on_gpu.same_bits(page, one)


@both(
    each(
        lambda p: [(f, case) for f in p.compiled for case in p.compiled_cases],
        lambda one: f"{one[0]}-{describe(one[1])}",
        [GPU],
    )
)
def test_torch_compile(page, one):
    on_gpu.compiled(page, *one)


@both(each(lambda p: p.graphs, describe, [GPU]))
def test_cuda_graph(page, one):
    on_gpu.graph(page, one)


@both(each(lambda p: p.trains, marks=[GPU]))
def test_trains_like_pytorch(page, one):
    on_gpu.trains(page, one)


@both(
    each(
        lambda p: [
            (f, N) for N in p.huge for f in p.huge_functions or p.functions
        ],
        lambda one: f"{one[0]}-{one[1]}",
        [GPU],
    )
)
def test_more_than_2_31_elements(page, one):
    name, N = one
    module = page.load()
    page.operation.huge(page.functions[name](module), module.DEVICE, N)


@both(each(lambda p: p.sanitizers, marks=[GPU]))
def test_sanitizer(page, one):
    on_gpu.sanitized(page, one)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="there is one GPU, not two"
)
@both(each(lambda p: p.functions, marks=[GPU]))
def test_a_second_gpu(page, one):
    on_gpu.second(page, one)
