"""Functions of the pages of Both Passes, with their kernels.

    tables, rotary_embedding, rotary_embedding_, rotate_query_and_key
    rms_norm, add_rms_norm
    attention
    linear
    swiglu, geglu, gated
    cross_entropy
    linear_cross_entropy

Both passes run in Triton. A name that several pages have begins with the word
of its page.

One kind of GPU a process. To try it without a GPU, set TRITON_INTERPRET=1.
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


# attention/04-rotary ----------------------------------------------------------
# Gives tables, rotary_embedding, rotary_embedding_, rotate_query_and_key.


ON_GPU = torch.cuda.is_available()


DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def tables(length, dimension, base=10000.0):
    """cos and sin of all angles, as (length, dimension / 2) in float32."""
    pair = torch.arange(dimension // 2, dtype=torch.float64, device=DEVICE)
    position = torch.arange(length, dtype=torch.float64, device=DEVICE)
    angle = position[:, None] * base ** (-2 * pair / dimension)
    return angle.cos().float(), angle.sin().float()


@triton.jit
def _turn(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate_heads(
    x,  # a tensor, its result, its heads, and the strides of both
    group,  # which HEADS heads are ours, counted through all sequences
    row,  # our positions, (ROWS, 1), in 64 bits
    length,  # positions that exist
    cos,  # their angles, (ROWS, PAIRS)
    sin,
    HALF: tl.constexpr,  # pairs of a row; PAIRS is the next power of two
    HEADS: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,  # turn back
):
    x_ptr, y_ptr, heads = x[0], x[1], x[2]
    x_batch, x_head, x_row, x_column = x[3], x[4], x[5], x[6]
    y_batch, y_head, y_row, y_column = x[7], x[8], x[9], x[10]
    ROWS: tl.constexpr = cos.shape[0]
    PAIRS: tl.constexpr = cos.shape[1]

    # Our first head. Batch 0 has the first ones, then comes batch 1.
    lead = group.to(tl.int64) * HEADS
    x_ptr += lead // heads * x_batch + lead % heads * x_head
    y_ptr += lead // heads * y_batch + lead % heads * y_head

    # What we load at once: whole rows, or their first halves. The second
    # halves lie HALF columns further on. All in 64 bits, for strides are long.
    COLUMNS: tl.constexpr = 2 * PAIRS if INTERLEAVED else PAIRS
    EXIST: tl.constexpr = 2 * HALF if INTERLEAVED else HALF
    column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    further = tl.full((), HALF, tl.int64)
    mask = (row < length) & (column < EXIST)
    x_at = x_ptr + row * x_row + column * x_column
    y_at = y_ptr + row * y_row + column * y_column

    # Request the pairs of all our heads. The loop is unrolled: tuples grow.
    firsts = ()
    seconds = ()
    for _ in tl.static_range(HEADS):
        a = tl.load(x_at, mask=mask, other=0)
        if INTERLEAVED:
            a, b = tl.split(a.reshape(ROWS, PAIRS, 2))
        else:
            b = tl.load(x_at + further * x_column, mask=mask, other=0)
        firsts += (a,)
        seconds += (b,)
        x_at += x_head

    # Only now touch an angle: whoever computes with a number waits for it. We
    # turn in float32, or in float64 if x has that, and round.
    wide: tl.constexpr = x_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if wide else tl.float32
    cos = cos.to(acc)
    sin = sin.to(acc)
    for i in tl.static_range(HEADS):
        a = firsts[i].to(acc)
        b = seconds[i].to(acc)
        if BACK:  # the same turn with a and b swapped goes back
            b, a = _turn(b, a, cos, sin)
        else:
            a, b = _turn(a, b, cos, sin)
        a = a.to(y_ptr.dtype.element_ty)
        b = b.to(y_ptr.dtype.element_ty)
        if INTERLEAVED:
            tl.store(y_at, tl.join(a, b).reshape(ROWS, COLUMNS), mask=mask)
        else:
            tl.store(y_at, a, mask=mask)
            tl.store(y_at + further * y_column, b, mask=mask)
        y_at += y_head


@triton.jit
def _rotary(
    q,  # a tuple: see x of _rotate_heads
    k,  # the same for another tensor; None: there is only q
    q_groups,  # groups of HEADS heads that q has, in all sequences
    groups,  # those of q and k together
    cos_ptr,  # (length, HALF), contiguous
    sin_ptr,  # the same
    length,
    HALF: tl.constexpr,  # pairs of a row
    PAIRS: tl.constexpr,  # HALF, or the next power of two
    ROWS: tl.constexpr,  # positions of a program
    HEADS: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,  # turn back
):
    # Programs with neighboring numbers have the same positions, and other
    # heads: the angles that one of them has loaded, the next finds in L2.
    tile = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]

    # Request the angles, once for all our heads.
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (row < length) & (pair < HALF)
    at = row * HALF + pair
    cos = tl.load(cos_ptr + at, mask=mask, other=0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0)

    # Are our heads those of q or of k? Without k, only the first call is
    # compiled.
    if k is None or group < q_groups:
        _rotate_heads(
            q, group, row, length, cos, sin, HALF, HEADS, INTERLEAVED, BACK
        )
    else:
        group -= q_groups
        _rotate_heads(
            k, group, row, length, cos, sin, HALF, HEADS, INTERLEAVED, BACK
        )


ROTARY_NUM_SMS = 4
if ON_GPU:
    ROTARY_NUM_SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count


def rotary_plan(tensors):
    """The tile of a program for tensors of (batch, heads, length, D)."""
    _, _, length, dimension = tensors[0].shape
    pairs = triton.next_power_of_2(dimension // 2)
    half_row = pairs * tensors[0].itemsize  # bytes
    rows = max(1024 // half_row, 1)
    warps = min(max(half_row // 1024, 1), 8)  # one, if rows are not very wide
    tiles = triton.cdiv(length, rows)
    all_heads = sum(t.shape[0] * t.shape[1] for t in tensors)
    for heads in (8, 4, 2, 1):
        divides = all(t.shape[1] % heads == 0 for t in tensors)
        enough = heads < 8 or tiles * all_heads // heads >= 4 * ROTARY_NUM_SMS
        if divides and enough:
            break
    if heads == 8:
        warps *= 2
    return {"PAIRS": pairs, "ROWS": rows, "HEADS": heads, "num_warps": warps}


def rotate(tensors, outputs, cos, sin, interleaved=False, back=False):
    """Rotate one or two tensors of (batch, heads, length, D) into outputs.

    The outputs may be the tensors themselves. cos and sin are contiguous.
    """
    pairs = zip(tensors, outputs, strict=True)
    pairs = [(t, y) for t, y in pairs if t.numel() > 0]
    if not pairs:
        return
    sizes = rotary_plan([t for t, _ in pairs])
    # What the kernel must know of each tensor.
    known = [(t, y, t.shape[1], *t.stride(), *y.stride()) for t, y in pairs]
    groups = [t.shape[0] * t.shape[1] // sizes["HEADS"] for t, _ in pairs]
    length, half = cos.shape
    tiles = triton.cdiv(length, sizes["ROWS"])
    _rotary[(tiles * sum(groups),)](
        q=known[0],
        k=known[1] if len(known) == 2 else None,
        q_groups=groups[0],
        groups=sum(groups),
        cos_ptr=cos,
        sin_ptr=sin,
        length=length,
        HALF=half,
        INTERLEAVED=interleaved,
        BACK=back,
        **sizes,
    )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cos, sin, interleaved, back, *tensors):
        """tensors are one or two of (batch, heads, length, D)."""
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.back = back
        outputs = tuple(torch.empty_like(t) for t in tensors)
        rotate(tensors, outputs, cos, sin, interleaved, back)
        return outputs

    @staticmethod
    def backward(ctx, *dys):
        cos, sin = ctx.saved_tensors
        dxs = _Rotary.apply(cos, sin, ctx.interleaved, not ctx.back, *dys)
        # The tables and the two switches have no gradient.
        return None, None, None, None, *dxs


def rotary_check_arguments(tensors, cos, sin):
    """Raise an error that names the wrong argument, and says why."""
    given = {**tensors, "cos": cos, "sin": sin}
    for name, t in given.items():
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(
                f"{name} has {t.dtype}: floats of 16 bits or more are taken"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.dim() < 2:
            raise ValueError(
                f"{name} has {t.dim()} dimensions: two or more are taken, and "
                "the last ones are length and dimension"
            )
        dimension = t.shape[-1]
        if dimension % 2 or not 2 <= dimension <= 1024:
            raise ValueError(
                f"the dimension of {name} is {dimension}: even numbers from 2 "
                "to 1024 are taken"
            )
        if t.dtype != first.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and {first_name} has {first.dtype}: "
                "they must be the same"
            )
        if t.shape[-2:] != first.shape[-2:]:
            raise ValueError(
                f"{name} ends in {tuple(t.shape[-2:])}, and {first_name} in "
                f"{tuple(first.shape[-2:])}: length and dimension must be the "
                "same"
            )
    length, dimension = first.shape[-2:]
    for name, t in (("cos", cos), ("sin", sin)):
        if t.shape != (length, dimension // 2):
            raise ValueError(
                f"{name} is {tuple(t.shape)}, and {first_name} needs "
                f"{(length, dimension // 2)}: length and half the dimension"
            )
        if t.requires_grad:
            raise ValueError(
                f"{name} requires a gradient: the tables are constants here"
            )


def as_four(x):
    """x as (batch, heads, length, D): a view, up to four dimensions."""
    if x.dim() > 4:
        return x.reshape(-1, *x.shape[-3:])
    return x[(None,) * (4 - x.dim())]


def rotary_embedding(x, cos, sin, interleaved=False):
    """x with its pairs rotated; both passes run in Triton.

    x is (..., length, dimension), with floats of 16 bits or more and any
    strides. cos and sin are (length, dimension / 2).
    """
    rotary_check_arguments({"x": x}, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    (y,) = _Rotary.apply(cos, sin, interleaved, False, as_four(x))
    return y.reshape(x.shape)


def rotate_query_and_key(query, key, cos, sin, interleaved=False):
    """The same for a query and a key, in one launch.

    They may differ in all dimensions but the last two.
    """
    rotary_check_arguments({"query": query, "key": key}, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    q, k = _Rotary.apply(
        cos, sin, interleaved, False, as_four(query), as_four(key)
    )
    return q.reshape(query.shape), k.reshape(key.shape)


class _RotaryInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        rotate([as_four(x)], [as_four(x)], cos, sin, interleaved)
        ctx.mark_dirty(x)  # x is not what it was: autograd must know
        return x

    @staticmethod
    def backward(ctx, dy):
        # Not in place: dy belongs to somebody else.
        cos, sin = ctx.saved_tensors
        (dx,) = _Rotary.apply(cos, sin, ctx.interleaved, True, as_four(dy))
        return dx.reshape(dy.shape), None, None, None


def check_in_place(x):
    if x.dim() > 4:
        raise ValueError(
            f"x has {x.dim()} dimensions: up to four are taken in place"
        )
    sizes_and_strides = zip(x.shape, x.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes_and_strides):
        raise ValueError("x has a stride of 0: its numbers share memory")
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise ValueError("x is a leaf that requires a gradient")


def rotary_embedding_(x, cos, sin, interleaved=False):
    """Like rotary_embedding, but x itself is rotated and returned."""
    rotary_check_arguments({"x": x}, cos, sin)
    check_in_place(x)
    cos, sin = cos.contiguous(), sin.contiguous()
    return _RotaryInPlace.apply(x, cos, sin, interleaved)


# norms-and-losses/02-rms-norm-16-bits -----------------------------------------
# Gives rms_norm, add_rms_norm.


CASTINGS = ("gemma", "llama", "none")


@triton.jit
def _norm_load(ptr, c, N: tl.constexpr, CHUNK: tl.constexpr, HINT: tl.constexpr):
    """Chunk c of the row that begins at ptr; 0 in idle lanes."""
    col = c * CHUNK + tl.arange(0, CHUNK)
    return tl.load(ptr + col, mask=col < N, other=0, eviction_policy=HINT)


@triton.jit
def _store(ptr, value, c, N: tl.constexpr, CHUNK: tl.constexpr):
    """The same for a store."""
    col = c * CHUNK + tl.arange(0, CHUNK)
    tl.store(ptr + col, value, mask=col < N)


@triton.jit
def _rounded(value, dtype: tl.constexpr, YES: tl.constexpr):
    """The nearest number of another type, in the type of the value."""
    if YES:
        value = value.to(dtype).to(value.dtype)
    return value


@triton.jit
def _factor(w, offset: tl.constexpr, CASTING: tl.constexpr, acc: tl.constexpr):
    """What x_hat is multiplied by; only gemma leaves the sum unrounded."""
    return _rounded(w.to(acc) + offset, w.dtype, CASTING != "gemma")


@triton.jit
def _rms_norm_fwd(
    x_ptr,  # (M, N), contiguous
    residual_ptr,  # (M, N), or None: only normalize
    w_ptr,  # (N,)
    y_ptr,  # (M, N)
    s_ptr,  # (M, N): the sum; not written without a residual
    rstd_ptr,  # (M,): 1 / root mean square, saved for the backward pass
    eps: tl.constexpr,  # added to the mean of the squares
    offset: tl.constexpr,  # New: added to w
    CASTING: tl.constexpr,  # New: where to round
    N: tl.constexpr,  # columns
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
):
    acc: tl.constexpr = rstd_ptr.dtype.element_ty  # float32, or float64
    half: tl.constexpr = y_ptr.dtype.element_ty  # what is rounded to
    NONE: tl.constexpr = CASTING == "none"
    row = tl.program_id(0).to(tl.int64)  # M * N may pass 2**31

    # Request the whole row before anything is stored: the compiler never
    # moves a load up over a store.
    xs = ()
    residuals = ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        xs += (_norm_load(x_ptr + row * N, c, N, CHUNK, "evict_first"),)
        if residual_ptr is not None:
            residuals += (_norm_load(residual_ptr + row * N, c, N, CHUNK, ""),)

    # Add, and round to the type of the stream. The squares are those of the
    # rounded sum.
    sums = ()
    squares = tl.zeros((CHUNK,), acc)
    for c in tl.static_range(len(xs)):
        s = xs[c]
        if residual_ptr is not None:
            s = (s.to(acc) + residuals[c].to(acc)).to(residuals[c].dtype)
            _store(s_ptr + row * N, s, c, N, CHUNK)
        sums += (s,)
        squares += _rounded(s.to(acc) * s.to(acc), half, NONE)

    # Idle lanes hold 0, which changes no sum.
    mean = _rounded(tl.sum(squares) / N, half, NONE)
    rstd = _rounded(tl.rsqrt(mean + eps), half, NONE)
    tl.store(rstd_ptr + row, rstd)

    # New: x_hat may be rounded before its product with w. A store rounds to
    # the type of its pointer.
    for c in tl.static_range(len(xs)):
        w = _norm_load(w_ptr, c, N, CHUNK, "evict_last")
        x_hat = _rounded(sums[c].to(acc) * rstd, half, CASTING != "gemma")
        y = x_hat * _factor(w, offset, CASTING, acc)
        _store(y_ptr + row * N, y, c, N, CHUNK)


def norm_plan_forward(N, sizes):
    """sizes: bytes of an element of x and, if there is one, the residual."""
    warps = triton.next_power_of_2(triton.cdiv(N * sum(sizes), 4096))
    warps = max(warps, 4)
    chunk = min(512 // sizes[0] * warps, triton.next_power_of_2(N))
    return {"CHUNK": chunk, "num_warps": warps}


def norm_forward(x, residual, w, eps, casting, offset):
    """y, s (x without a residual) and 1 / root mean square; all contiguous."""
    N = w.numel()
    M = x.numel() // N
    y = torch.empty_like(x)
    s = x
    sizes = [x.itemsize]
    if residual is not None:
        s = torch.empty_like(residual)
        sizes.append(residual.itemsize)
    # 16-bit rows are summed in float32.
    acc = torch.promote_types(s.dtype, torch.float32)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    _rms_norm_fwd[(M,)](
        x_ptr=x,
        residual_ptr=residual,
        w_ptr=w,
        y_ptr=y,
        s_ptr=s,
        rstd_ptr=rstd,
        eps=eps,
        offset=offset,
        CASTING=casting,
        N=N,
        **norm_plan_forward(N, sizes),
    )
    return y, s, rstd


@triton.jit
def _rms_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    ds_ptr,  # (M, N), or None: nothing arrives from the stream
    s_ptr,  # (M, N), from the forward pass
    w_ptr,  # (N,)
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), in the type of x
    dr_ptr,  # New: the same in the type of the stream, or None
    sums_ptr,  # (programs, N): what each program adds to dw
    M,  # rows
    offset: tl.constexpr,  # New: added to w
    CASTING: tl.constexpr,  # New: where the forward pass rounded
    N: tl.constexpr,  # columns
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STAGES: tl.constexpr,  # how far ahead rows are requested
):
    acc: tl.constexpr = rstd_ptr.dtype.element_ty  # float32, or float64

    # w stays in registers for all rows, in its own type, beside the sums.
    ws = ()
    dws = ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        ws += (_norm_load(w_ptr, c, N, CHUNK, ""),)
        dws += (tl.zeros((CHUNK,), acc),)

    for row in tl.range(
        tl.program_id(0),
        M,
        tl.num_programs(0),
        num_stages=STAGES,
        # The compiler would convert w to float32 before the loop, which takes
        # twice the registers.
        disable_licm=True,
    ):
        at = tl.cast(row, tl.int64) * N
        rstd = tl.load(rstd_ptr + row)

        # Load the row, and add up s * f * dy for c.
        ss = ()
        dys = ()
        total = tl.zeros((CHUNK,), acc)
        for c in tl.static_range(len(ws)):
            ss += (_norm_load(s_ptr + at, c, N, CHUNK, ""),)
            dys += (_norm_load(dy_ptr + at, c, N, CHUNK, ""),)
            f_dy = dys[c].to(acc) * _factor(ws[c], offset, CASTING, acc)
            total += ss[c].to(acc) * f_dy

        # c * rstd**2, computed from the left: rstd**3 alone may be more than
        # float32 holds.
        a = tl.sum(total) / N * rstd * rstd * rstd

        # An element of a tuple cannot be replaced, so sums go into a new one.
        sums = ()
        for c in tl.static_range(len(ws)):
            s = ss[c].to(acc)
            scaled = dys[c].to(acc) * rstd
            sums += (dws[c] + scaled * s,)
            dx = scaled * _factor(ws[c], offset, CASTING, acc)
            if ds_ptr is not None:
                dx += _norm_load(ds_ptr + at, c, N, CHUNK, "").to(acc)
            # A store rounds to the type of its pointer.
            _store(dx_ptr + at, dx - s * a, c, N, CHUNK)
            if dr_ptr is not None:
                _store(dr_ptr + at, dx - s * a, c, N, CHUNK)
        dws = sums

    for c in tl.static_range(len(dws)):
        _store(sums_ptr + tl.program_id(0) * N, dws[c], c, N, CHUNK)


GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NORM_NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
NORM_SHARED = getattr(GPU, "shared_memory_per_block_optin", 65536)


def norm_plan_backward(N, sizes):
    """sizes: bytes of an element of s, dy and, if there is one, ds."""
    warps = 8
    if N * sizes[0] <= 8192:
        warps = 4
    programs_on_an_sm = 8 // warps
    chunk = min(512 // sizes[1] * warps, triton.next_power_of_2(N))
    row_bytes = triton.cdiv(N, chunk) * chunk * sum(sizes)
    ahead = min((NORM_SHARED - 4096) // (row_bytes * programs_on_an_sm), 3)
    plan = {"CHUNK": chunk, "STAGES": 1 + ahead, "num_warps": warps}
    return programs_on_an_sm, plan


def norm_backward(dy, ds, s, w, rstd, casting, offset):
    """dx, the gradient of the residual, and dw; ds may be None."""
    M = rstd.numel()
    N = w.numel()
    dx = torch.empty_like(dy)
    dr = None
    if s.dtype != dy.dtype:
        dr = torch.empty_like(s)
    sizes = [t.itemsize for t in (s, dy, ds) if t is not None]
    programs_on_an_sm, plan = norm_plan_backward(N, sizes)
    rounds = triton.cdiv(M, NORM_NUM_SMS * programs_on_an_sm)
    programs = triton.cdiv(M, max(rounds, 1))
    sums = torch.empty(programs, N, dtype=rstd.dtype, device=s.device)
    _rms_norm_bwd[(programs,)](
        dy_ptr=dy,
        ds_ptr=ds,
        s_ptr=s,
        w_ptr=w,
        rstd_ptr=rstd,
        dx_ptr=dx,
        dr_ptr=dr,
        sums_ptr=sums,
        M=M,
        offset=offset,
        CASTING=casting,
        N=N,
        **plan,
    )
    dw = sums.sum(dim=0).reshape(w.shape)
    if dr is None:
        dr = dx
    return dx, dr, dw


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, w, eps, casting, offset):
        y, s, rstd = norm_forward(x, residual, w, eps, casting, offset)
        ctx.save_for_backward(s, w, rstd)
        ctx.casting = casting
        ctx.offset = offset
        # A result that nobody used has the gradient None, not zeros.
        ctx.set_materialize_grads(False)
        if residual is None:
            return y
        return y, s

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy, ds=None):
        if dy is None:  # only s was used, and it is a sum
            return ds, ds, None, None, None, None
        s, w, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        if ds is not None:
            ds = ds.contiguous()
        dx, dr, dw = norm_backward(dy, ds, s, w, rstd, ctx.casting, ctx.offset)
        if not ctx.needs_input_grad[1]:
            dr = None
        # One gradient for each argument; the last three have none.
        return dx, dr, dw, None, None, None


def norm_check_arguments(x, residual, shape, weight, eps, casting):
    """Raise an error that names the wrong argument, and says why."""
    last_dimensions = x.shape[: x.dim() - len(shape)] + shape
    wanted = {"x": last_dimensions, "residual": x.shape, "weight": shape}
    tensors = {"x": x, "residual": residual, "weight": weight}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        wrong = not tensor.is_floating_point() or tensor.itemsize < 2
        if name == "residual" and not wrong:  # of the type of x, or wider
            both = torch.promote_types(x.dtype, tensor.dtype)
            wrong = both != tensor.dtype
        if wrong:
            raise TypeError(f"{name} is {tensor.dtype}, and x is {x.dtype}")
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: all go on {DEVICE}"
            )
        if tensor.shape != wanted[name]:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, "
                f"normalized_shape {tuple(shape)}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")
    if casting not in CASTINGS:
        raise ValueError(f"casting is {casting}: it must be one of {CASTINGS}")
    N = 0
    if len(shape) > 0:
        N = shape.numel()
    most = 16384 // x.itemsize
    if not 0 < N <= most:
        raise ValueError(
            f"normalized_shape has {N} columns: this page takes 1 to {most}"
        )


def rms_norm(
    x,
    normalized_shape,
    weight=None,
    eps=None,
    casting="gemma",
    offset=0.0,
    residual=None,
):
    """x over its root mean square, times offset + weight.

    casting says where to round, and is one of CASTINGS. With a residual, the
    sum of both is normalized and returned, too: y, s.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    if eps is None:  # as PyTorch does
        acc = torch.promote_types(x.dtype, torch.float32)
        eps = torch.finfo(acc).eps
    eps = float(eps)
    norm_check_arguments(x, residual, shape, weight, eps, casting)
    if weight is None:
        weight = x.new_ones(shape)
        offset = 0.0
    if residual is not None:
        residual = residual.contiguous()
    x = x.contiguous()
    weight = weight.contiguous()
    return Norm.apply(x, residual, weight, eps, casting, float(offset))


def add_rms_norm(x, residual, *args, **options):
    """The pair y, s: s = x + residual, and y = rms_norm(s)."""
    if residual is None:
        raise TypeError("residual is None: rms_norm takes none")
    return rms_norm(x, *args, residual=residual, **options)


# attention/03-any-attention ---------------------------------------------------
# Gives attention.


@triton.jit
def _attend(
    maximum,  # of each query, as the next two
    total,
    weighted,
    q,
    k_desc,
    v_desc,
    batch,
    head,  # of the keys
    start,  # the first key of the tile
    limit,  # how many keys a query sees: a column, or one number for all
    scale,
    DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of the tile
    PRECISION: tl.constexpr,  # of products of float32
):
    """The sums of a tile of queries, with one tile of keys more."""
    k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    score = tl.dot(q, k.T, input_precision=PRECISION)
    if MASK:
        key = start + tl.arange(0, TILE_K)
        score = tl.where(key[None, :] < limit, score, float("-inf"))
    new = tl.maximum(maximum, tl.max(score, axis=1) * scale)
    power = tl.exp2(score * scale - new[:, None])
    shrink = tl.exp2(maximum - new)
    total = total * shrink + tl.sum(power, axis=1)
    weighted = weighted * shrink[:, None]
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    power = power.to(v.dtype)
    weighted = tl.dot(power, v, weighted, input_precision=PRECISION)
    return new, total, weighted


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_fwd(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    lse_ptr,  # (batch, heads, rows): saved for the backward pass
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores, times LOG2E
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which queries are ours? In causal attention we count tiles from the end.
    tiles = tl.cdiv(queries, TILE_Q)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * TILE_Q
    query = first + tl.arange(0, TILE_Q)
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP

    # How many keys does each of them see? Below ``whole`` all of them see all
    # keys, and from ``end`` on none of them sees any.
    limit = keys
    whole = keys // TILE_K * TILE_K
    end = keys
    if CAUSAL:
        limit = tl.minimum(query + 1, keys)[:, None]
        whole = tl.minimum(first // TILE_K * TILE_K, whole)
        end = tl.minimum(first + TILE_Q, keys)

    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, DIM), tl.float32)

    # Tiles that all of our queries see, without a mask. Key 0 is in the first
    # tile of whichever loop comes first, and every query sees it: so no
    # maximum stays infinite.
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
        maximum, total, weighted = _attend(
            maximum, total, weighted, q, k_desc, v_desc, batch, k_head, start,
            limit, scale, DIM, TILE_K, False, PRECISION,
        )  # fmt: skip

    # Tiles on the diagonal, or the one that is not full.
    if CAUSAL:
        for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
            maximum, total, weighted = _attend(
                maximum, total, weighted, q, k_desc, v_desc, batch, k_head,
                start, limit, scale, DIM, TILE_K, True, PRECISION,
            )  # fmt: skip
    elif RAGGED:
        maximum, total, weighted = _attend(
            maximum, total, weighted, q, k_desc, v_desc, batch, k_head, whole,
            limit, scale, DIM, TILE_K, True, PRECISION,
        )  # fmt: skip

    y = (weighted / total[:, None]).to(y_desc.dtype)
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, TILE_Q, DIM))
    at = lead.to(tl.int64) * rows + query  # may pass 2**31
    tl.store(lse_ptr + at, maximum + tl.log2(total))


ATTENTION_LOG2E = 1.4426950408889634  # the logarithm of e, to the base 2


def width_of(D):
    """Columns of a tile for rows of D numbers: a power of two, at least 16,
    which is the least that a product of tiles takes."""
    return max(triton.next_power_of_2(D), 16)


def rows_like(t):
    """An empty tensor of the same shape and order of dimensions, whose rows
    begin at multiples of 16 bytes."""
    D = t.shape[-1]
    unit = 16 // t.itemsize
    padded = triton.cdiv(D, unit) * unit
    # The dimension with the largest stride comes first in memory.
    order = sorted(range(3), key=lambda dimension: -t.stride(dimension))
    shape = [t.shape[dimension] for dimension in order]
    memory = torch.empty(*shape, padded, dtype=t.dtype, device=t.device)
    places = [order.index(dimension) for dimension in range(3)]
    return memory.permute(*places, 3)[..., :D]


def attention_for_descriptors(t):
    """The tensor, or a copy of it that a descriptor takes."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(-1) == 1
    for stride in t.stride()[:-1]:
        # A stride of 0, as an expanded tensor has it, is copied, too.
        if stride <= 0 or stride * t.itemsize % 16:
            aligned = False
    if aligned:
        return t
    return rows_like(t).copy_(t)


def tiles_of(t, rows):
    """A descriptor of (batch, heads, length, D), in tiles of so many rows."""
    tile = [1, 1, rows, width_of(t.shape[-1])]
    return TensorDescriptor.from_tensor(t, tile)


ATTENTION_TILES = {
    # width: queries, keys, warps and stages; then the same if causal
    16: ((128, 64, 4, 3), (128, 64, 4, 3)),
    32: ((128, 64, 4, 3), (128, 64, 4, 3)),
    64: ((64, 128, 4, 2), (64, 128, 4, 2)),
    128: ((128, 64, 4, 2), (64, 64, 4, 3)),
    256: ((128, 64, 8, 2), (128, 64, 8, 2)),
}


def small_tiles(dtype):
    """Whether operands lie in registers: in float32, and without a TMA."""
    if dtype == torch.float32:
        return True
    if not ON_GPU:
        return False  # the interpreter has no registers
    if torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability()[0] < 9


def options(tile_q, tile_k, warps, stages, dtype, D):
    """Constants of a kernel that depend on the type and the width of rows."""
    precision = None  # what a GPU does by itself; 16 bits need no choice
    if dtype == torch.float32 and torch.version.hip is None:
        precision = "tf32x3"
    return {
        "DIM": width_of(D),
        "TILE_Q": tile_q,
        "TILE_K": tile_k,
        "PRECISION": precision,
        "STAGES": stages,
        "num_warps": warps,
    }


def attention_plan_forward(dtype, D, is_causal):
    if small_tiles(dtype):
        return options(16, 32, 8, 2, dtype, D)
    usual, causal = ATTENTION_TILES[width_of(D)]
    tiles = causal if is_causal else usual
    return options(*tiles, dtype, D)


def empty_lse(query, is_causal):
    """(batch, heads, rows): room for whole tiles of queries."""
    batch, heads, queries, D = query.shape
    tile_q = attention_plan_forward(query.dtype, D, is_causal)["TILE_Q"]
    rows = triton.cdiv(queries, tile_q) * tile_q
    return query.new_empty(batch, heads, rows, dtype=torch.float32)


def attention_forward(query, key, value, is_causal, scale, kernel=_any_attention_fwd):
    """The results, and a log-sum-exp for each query."""
    batch, heads, queries, D = query.shape
    _, k_heads, keys, _ = key.shape
    plan = attention_plan_forward(query.dtype, D, is_causal)
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    tiles = triton.cdiv(queries, tile_q)
    y = rows_like(query)
    lse = empty_lse(query, is_causal)
    if y.numel() == 0:
        return y, lse
    if keys == 0:  # nothing to attend to
        return y.zero_(), lse.zero_()
    kernel[(tiles * batch * heads,)](
        q_desc=tiles_of(attention_for_descriptors(query), tile_q),
        k_desc=tiles_of(attention_for_descriptors(key), tile_k),
        v_desc=tiles_of(attention_for_descriptors(value), tile_k),
        y_desc=tiles_of(y, tile_q),
        lse_ptr=lse,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale * ATTENTION_LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        **plan,
    )
    return y, lse


@triton.jit
def _step_of_queries(
    dq,
    q,
    dy,
    lse,
    delta,
    k_desc,
    v_desc,
    batch,
    head,  # of the keys
    start,  # the first key of the tile
    limit,  # how many keys a query sees: a column, or one number for all
    scale,
    DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of the tile
    PRECISION: tl.constexpr,  # of products of float32
):
    """dq of a tile of queries, with one tile of keys more."""
    k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    score = tl.dot(q, k.T, input_precision=PRECISION)
    if MASK:
        key = start + tl.arange(0, TILE_K)
        score = tl.where(key[None, :] < limit, score, float("-inf"))
    p = tl.exp2(score * scale - lse[:, None])
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    dp = tl.dot(dy, v.T, input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_bwd_queries(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc, and so are the next two
    dy_desc,
    dq_desc,
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # (batch, heads, rows): stored for the other kernel
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dq
    log2e,  # LOG2E, for the powers of 2
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which queries are ours, and which keys do they see? As in the forward
    # kernel.
    tiles = tl.cdiv(queries, TILE_Q)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * TILE_Q
    query = first + tl.arange(0, TILE_Q)
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP
    limit = keys
    whole = keys // TILE_K * TILE_K
    end = keys
    if CAUSAL:
        limit = tl.minimum(query + 1, keys)[:, None]
        whole = tl.minimum(first // TILE_K * TILE_K, whole)
        end = tl.minimum(first + TILE_Q, keys)

    # delta, for us and for the kernel of the keys.
    y = y_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    dy = dy_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=1)
    at = lead.to(tl.int64) * rows + query
    tl.store(delta_ptr + at, delta)

    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    lse = tl.load(lse_ptr + at)
    dq = tl.zeros((TILE_Q, DIM), tl.float32)
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
        dq = _step_of_queries(
            dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, start, limit,
            scale * log2e, DIM, TILE_K, False, PRECISION,
        )  # fmt: skip
    if CAUSAL:
        for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
            dq = _step_of_queries(
                dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, start,
                limit, scale * log2e, DIM, TILE_K, True, PRECISION,
            )  # fmt: skip
    elif RAGGED:
        dq = _step_of_queries(
            dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, whole, limit,
            scale * log2e, DIM, TILE_K, True, PRECISION,
        )  # fmt: skip

    dq = (dq * scale).to(dq_desc.dtype)
    dq_desc.store([batch, head, first, 0], dq.reshape(1, 1, TILE_Q, DIM))


@triton.jit
def _step_of_keys(
    dk,
    dv,
    k,
    v,
    q_desc,
    dy_desc,
    lse_ptr,  # of the first query of this head, as delta_ptr
    delta_ptr,
    batch,
    head,  # of the queries
    start,  # the first query of the tile
    key,  # the indices of our keys
    scale,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of our keys
    PRECISION: tl.constexpr,  # of products of float32
):
    """dk and dv of a tile of keys, with one tile of queries more."""
    # A query that does not exist is a row of zeros, and so is its dy. It adds
    # nothing to dk and dv.
    q = q_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)
    query = start + tl.arange(0, TILE_Q)
    score = tl.dot(k, q.T, input_precision=PRECISION)
    lse = tl.load(lse_ptr + query)
    if MASK:
        seen = key[:, None] <= query[None, :]
        score = tl.where(seen, score, float("-inf"))
    p = tl.exp2(score * scale - lse[None, :])
    dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)
    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
    delta = tl.load(delta_ptr + query)
    dp = tl.dot(v, dy.T, input_precision=PRECISION)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_bwd_keys(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # (batch, heads, rows)
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dk
    log2e,  # LOG2E, for the powers of 2
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a step
    TILE_K: tl.constexpr,  # keys of a program
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which keys are ours? The first tile has most to do if causal.
    tiles = tl.cdiv(keys, TILE_K)
    first = tl.program_id(0) % tiles * TILE_K
    key = first + tl.arange(0, TILE_K)
    k_lead = tl.program_id(0) // tiles
    batch = k_lead // (heads // GROUP)
    k_head = k_lead % (heads // GROUP)
    k = k_desc.load([batch, k_head, first, 0]).reshape(TILE_K, DIM)
    v = v_desc.load([batch, k_head, first, 0]).reshape(TILE_K, DIM)
    dk = tl.zeros((TILE_K, DIM), tl.float32)
    dv = tl.zeros((TILE_K, DIM), tl.float32)

    # If causal, the queries before ``first`` see none of our keys, and from
    # ``whole`` on they see all. Both are multiples of TILE_Q.
    whole = 0
    if CAUSAL:
        whole = first + TILE_K

    # The queries of all heads of our group, which are neighbors if we count
    # the heads of all sequences. Both sums fill most registers. So we tell the
    # compiler to compute nothing before a loop that would be the same in each
    # step, because it would keep that in registers.
    for lead in tl.range(
        k_lead * GROUP, (k_lead + 1) * GROUP, disable_licm=True
    ):
        batch = lead // heads
        head = lead % heads
        at = tl.cast(lead, tl.int64) * rows
        if CAUSAL:
            for start in tl.range(
                first,
                tl.minimum(whole, queries),
                TILE_Q,
                num_stages=STAGES,
                disable_licm=True,
            ):
                dk, dv = _step_of_keys(
                    dk, dv, k, v, q_desc, dy_desc, lse_ptr + at,
                    delta_ptr + at, batch, head, start, key, scale * log2e,
                    DIM, TILE_Q, True, PRECISION,
                )  # fmt: skip
        for start in tl.range(
            whole, queries, TILE_Q, num_stages=STAGES, disable_licm=True
        ):
            dk, dv = _step_of_keys(
                dk, dv, k, v, q_desc, dy_desc, lse_ptr + at, delta_ptr + at,
                batch, head, start, key, scale * log2e, DIM, TILE_Q, False,
                PRECISION,
            )  # fmt: skip

    dk = (dk * scale).to(dk_desc.dtype)
    dv = dv.to(dv_desc.dtype)
    dk_desc.store([batch, k_head, first, 0], dk.reshape(1, 1, TILE_K, DIM))
    dv_desc.store([batch, k_head, first, 0], dv.reshape(1, 1, TILE_K, DIM))


OWN_AND_STEP = {
    # width: what a program owns, what it takes in a step, warps, stages
    16: (64, 64, 4, 3),
    32: (64, 64, 4, 3),
    64: (64, 64, 4, 3),
    128: (64, 64, 4, 2),
    256: (64, 32, 8, 2),
}


def attention_plan_backward(dtype, D):
    """For the kernel of the queries, and for that of the keys."""
    own, step, warps, stages = OWN_AND_STEP[width_of(D)]
    if small_tiles(dtype):
        own, step, warps, stages = 16, 16, 8, 2
    return (
        options(own, step, warps, stages, dtype, D),
        options(step, own, warps, stages, dtype, D),
    )


def attention_backward(dy, query, key, value, y, lse, is_causal, scale):
    """dq, dk and dv."""
    batch, heads, queries, D = query.shape
    _, k_heads, keys, _ = key.shape
    dq = rows_like(query)
    dk = rows_like(key)
    dv = rows_like(value)
    if dq.numel() == 0 or dk.numel() == 0:  # nobody attends to anything
        return dq.zero_(), dk.zero_(), dv.zero_()
    q = attention_for_descriptors(query)
    k = attention_for_descriptors(key)
    v = attention_for_descriptors(value)
    dy = attention_for_descriptors(dy)
    delta = torch.empty_like(lse)
    for_queries, for_keys = attention_plan_backward(query.dtype, D)

    # First the queries, because the keys need their delta.
    tile_q = for_queries["TILE_Q"]
    tile_k = for_queries["TILE_K"]
    tiles = triton.cdiv(queries, tile_q)
    _any_attention_bwd_queries[(tiles * batch * heads,)](
        q_desc=tiles_of(q, tile_q),
        k_desc=tiles_of(k, tile_k),
        v_desc=tiles_of(v, tile_k),
        y_desc=tiles_of(y, tile_q),
        dy_desc=tiles_of(dy, tile_q),
        dq_desc=tiles_of(dq, tile_q),
        lse_ptr=lse,
        delta_ptr=delta,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=ATTENTION_LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        **for_queries,
    )

    tile_q = for_keys["TILE_Q"]
    tile_k = for_keys["TILE_K"]
    tiles = triton.cdiv(keys, tile_k)
    _any_attention_bwd_keys[(tiles * batch * k_heads,)](
        q_desc=tiles_of(q, tile_q),
        k_desc=tiles_of(k, tile_k),
        v_desc=tiles_of(v, tile_k),
        dy_desc=tiles_of(dy, tile_q),
        dk_desc=tiles_of(dk, tile_k),
        dv_desc=tiles_of(dv, tile_k),
        lse_ptr=lse,
        delta_ptr=delta,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=ATTENTION_LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        **for_keys,
    )
    return dq, dk, dv


class _AnyAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale):
        y, lse = attention_forward(query, key, value, is_causal, scale)
        ctx.save_for_backward(query, key, value, y, lse)
        ctx.is_causal = is_causal
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        grads = attention_backward(dy, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
        return *grads, None, None


@torch.library.custom_op("both_passes::any_attention", mutates_args=())
def operator_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_forward(query, key, value, is_causal, scale)


@operator_forward.register_fake
def _(query, key, value, is_causal, scale):
    return rows_like(query), empty_lse(query, is_causal)


@torch.library.custom_op("both_passes::any_attention_bwd", mutates_args=())
def operator_backward(
    dy: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    y: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return attention_backward(dy, query, key, value, y, lse, is_causal, scale)


@operator_backward.register_fake
def _(dy, query, key, value, y, lse, is_causal, scale):
    return rows_like(query), rows_like(key), rows_like(value)


def keep(ctx, inputs, output):
    query, key, value, is_causal, scale = inputs
    y, lse = output
    ctx.save_for_backward(query, key, value, y, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.is_causal = is_causal
    ctx.scale = scale


def operator_gradients(ctx, dy, _):
    grads = operator_backward(dy, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return *grads, None, None


BOUND = operator_forward.register_autograd(
    operator_gradients, setup_context=keep
)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(name, t, query):
    if t.dtype not in DTYPES:
        raise TypeError(
            f"{name} has {t.dtype}: float16, bfloat16 and float32 are taken"
        )
    if t.dtype != query.dtype:
        raise TypeError(
            f"{name} has {t.dtype}, and query has {query.dtype}: they must be "
            "the same"
        )
    if t.device.type != DEVICE.type:
        raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        raise ValueError(
            f"{name} is on {t.device}, which is not the current GPU"
        )
    if t.dim() != 4:
        raise ValueError(
            f"{name} has {t.dim()} dimensions, not 4: batch, heads, length, "
            "head dimension"
        )


def check_heads(heads, k_heads, enable_gqa):
    if heads == k_heads:
        return
    if not enable_gqa:
        raise ValueError(
            f"key has {k_heads} heads, and query has {heads}: they must be "
            "the same without enable_gqa"
        )
    if k_heads == 0 or heads % k_heads:
        raise ValueError(
            f"key has {k_heads} heads, and query has {heads}, which must be a "
            "multiple"
        )


def attention_check_arguments(query, key, value, scale, enable_gqa):
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, t, query)
    batch, heads, _, D = query.shape
    if not 1 <= D <= max(ATTENTION_TILES):
        raise ValueError(
            f"the head dimension is {D}: 1 to {max(ATTENTION_TILES)} are taken"
        )
    for name, t in (("key", key), ("value", value)):
        if t.shape[-1] != D:
            raise ValueError(
                f"the head dimension of {name} is {t.shape[-1]}, and that of "
                f"query is {D}"
            )
        if t.shape[0] != batch:
            raise ValueError(
                f"{name} has {t.shape[0]} sequences, and query has {batch}"
            )
    check_heads(heads, key.shape[1], enable_gqa)
    if value.shape[1] != key.shape[1]:
        raise ValueError(
            f"value has {value.shape[1]} heads, and key has {key.shape[1]}"
        )
    if value.shape[2] != key.shape[2]:
        raise ValueError(
            f"value has {value.shape[2]} rows, and key has {key.shape[2]}"
        )
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}: a finite number above 0 is taken")


def as_autocast(*tensors):
    """The tensors, in the type of torch.autocast if that is on."""
    kind = "cuda" if ON_GPU else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    return [t.to(torch.get_autocast_dtype(kind)) for t in tensors]


def attention(
    query, key, value, is_causal=False, scale=None, enable_gqa=False
):
    """F.scaled_dot_product_attention without a mask and without dropout.

    query is (batch, heads, queries, D), key and value are (batch, heads, keys,
    D), all in float16, bfloat16 or float32, with D from 1 to 256 and any
    strides. If is_causal, query i sees the keys up to i. Without a scale it is
    one over the root of D. If enable_gqa, query may have a multiple of the
    heads of key.
    """
    query, key, value = as_autocast(query, key, value)
    attention_check_arguments(query, key, value, scale, enable_gqa)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    dtype = query.dtype
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        query, key, value = query.float(), key.float(), value.float()
    if torch.compiler.is_compiling():
        y, _ = operator_forward(query, key, value, is_causal, scale)
    else:
        y = _AnyAttention.apply(query, key, value, is_causal, scale)
    return y.to(dtype)


# matrix-products/01-linear ----------------------------------------------------
# Gives linear.


@triton.jit
def _place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile, by its number: groups of so many rows of
    tiles, and in a group column by column."""
    first = tile // (GROUP * columns) * GROUP
    # The last group may have fewer rows.
    height = tl.minimum(rows - first, GROUP)
    place = tile % (GROUP * columns)
    return first + place % height, place // height


PTX = tl.constexpr(ON_GPU and torch.version.hip is None)


@triton.jit
def _sigmoid(x):
    if PTX and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 a;
            mul.f32 a, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 a, a;
            add.f32 a, a, 0f3F800000;  // 1
            rcp.approx.ftz.f32 $0, a;
            }
            """,
            "=f,f",  # one result and one argument, both in registers
            [x],
            dtype=tl.float32,
            is_pure=True,  # the compiler may drop or move it
            pack=1,  # an element at a time
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _silu(x):
    sigmoid = _sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def _relu(z):
    return tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)


@triton.jit
def _linear_gelu(z):
    # From 30 on the sigmoid is 1, and below -30 it is less than the smallest
    # number of float32, so 0. Without these limits the cube could overflow.
    near = tl.minimum(tl.maximum(z, -30.0), 30.0)
    square = near * near
    # u, and its derivative times z. 2 sqrt(2 / pi) is 1.5957..., and times
    # 0.044715 it is 0.0713...; three times that is 0.2140...
    u = near * (1.5957691216057308 + 0.07135481627260025 * square)
    du = near * (1.5957691216057308 + 0.21406444881780076 * square)
    sigmoid = _sigmoid(u)
    return z * sigmoid, sigmoid * (1 + du * (1 - sigmoid))


@triton.jit
def _epilogue(
    sums,  # a tile of sums, in float32
    row,  # where the tile begins
    column,
    c_desc,  # (M, N) in tiles of this shape, or None
    c_ptr,  # (M, N), contiguous, if there is no descriptor
    bias_ptr,  # (N,), or None
    slope_desc,  # as c_desc: where the slope goes; or None
    M,
    N,
    ACT: tl.constexpr,  # the activation, or None
):
    col = column + tl.arange(0, sums.shape[1])
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=col < N, other=0)
        sums += bias.to(tl.float32)[None, :]
    if ACT is not None:
        sums, slope = ACT(sums)
        # If nobody wants the slope, the compiler drops its instructions.
        if slope_desc is not None:
            slope_desc.store([row, column], slope.to(slope_desc.dtype))
    if c_desc is not None:
        c_desc.store([row, column], sums.to(c_desc.dtype))
    else:
        line = (row + tl.arange(0, sums.shape[0])).to(tl.int64)
        mask = (line[:, None] < M) & (col[None, :] < N)
        tl.store(c_ptr + line[:, None] * N + col[None, :], sums, mask=mask)


@triton.jit
def _linear_load(desc, row, column, TRANSPOSED: tl.constexpr):
    """The tile of a matrix that begins there, however the matrix lies."""
    if TRANSPOSED:
        return desc.load([column, row]).T
    else:
        return desc.load([row, column])


@triton.jit
def _product(
    a_desc,  # (M, K) in tiles of TILE_M and TILE_K; transposed, (K, M)
    b_desc,  # (K, N) in tiles of TILE_K and TILE_N; transposed, (N, K)
    c_desc,  # (M, N) in what is stored at a time; or None
    c_ptr,  # (PARTS, M, N), contiguous, if there is no descriptor
    bias_ptr,  # (N,), or None
    slope_desc,  # as c_desc, or None
    M,
    N,
    K,
    ACT: tl.constexpr,  # the activation, or None
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles in a group
    STAGES: tl.constexpr,  # num_stages of the inner loop
    STAY: tl.constexpr,  # whether programs take several tiles
    HALVES: tl.constexpr,  # whether results are stored in two halves
    DIVIDED: tl.constexpr,  # whether K is divided into parts
    PARTS,  # how many there are, each added up on its own
    K_PART,  # the length of such a part
    PRECISION: tl.constexpr,  # of float32: "tf32" or "ieee"
):
    # Without this promise the compiler would also write code for K = 0.
    tl.assume(K > 0)
    rows = tl.cdiv(M, TILE_M)
    columns = tl.cdiv(N, TILE_N)
    tiles = rows * columns

    # One tile after the other: ours have numbers that lie as far apart as
    # there are programs. (With a program for each tile, it is one turn.)
    # ``flatten`` makes one loop of both loops, so that loads of the next tile
    # begin before this one is stored.
    for work in tl.range(
        tl.program_id(0), tiles * PARTS, tl.num_programs(0), flatten=STAY
    ):
        row, column = _place(work % tiles, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N
        part = work // tiles
        begin = 0
        end = K
        if DIVIDED:
            begin = part * K_PART
            end = tl.minimum(begin + K_PART, K)

        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(begin, end, TILE_K, num_stages=STAGES):
            a = _linear_load(a_desc, row, k, A_TRANSPOSED)
            b = _linear_load(b_desc, k, column, B_TRANSPOSED)
            sums = tl.dot(a, b, sums, input_precision=PRECISION)

        # Each part has its own matrix of results.
        part_ptr = c_ptr
        if DIVIDED:
            part_ptr += part.to(tl.int64) * M * N
        # The whole tile, or its left and its right half.
        pieces = (sums,)
        if HALVES:
            # split() needs a last dimension of 2, and gives both parts.
            halves = sums.reshape(TILE_M, 2, TILE_N // 2)
            pieces = halves.permute(0, 2, 1).split()
        for i in tl.static_range(len(pieces)):
            _epilogue(
                sums=pieces[i],
                row=row,
                column=column + i * pieces[i].shape[1],
                c_desc=c_desc,
                c_ptr=part_ptr,
                bias_ptr=bias_ptr,
                slope_desc=slope_desc,
                M=M,
                N=N,
                ACT=ACT,
            )
LINEAR_NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def shared_memory():
    """Bytes that a program can have; without a GPU, those of an H200."""
    if not ON_GPU:
        return 232448
    return getattr(GPU, "shared_memory_per_block_optin", 65536)


LINEAR_SHARED = shared_memory()


def lies_in_rows(t):
    """Whether a descriptor takes it: numbers of a row side by side, and each
    row at a multiple of 16 bytes."""
    step = t.stride(0) * t.itemsize
    aligned = t.data_ptr() % 16 == 0 and step % 16 == 0
    return aligned and t.stride(1) == 1 and step > 0


def padded(rows, columns, dtype, device):
    """A new matrix whose rows lie as a descriptor wants."""
    step = 16 // dtype.itemsize
    width = triton.cdiv(columns, step) * step
    return torch.empty(rows, width, dtype=dtype, device=device)[:, :columns]


def linear_descriptor(t, rows, columns):
    """A descriptor in tiles of such a shape, and whether it is transposed."""
    if t.stride(1) == 1:
        return TensorDescriptor.from_tensor(t, [rows, columns]), False
    return TensorDescriptor.from_tensor(t.T, [columns, rows]), True


def launch(a, b, c, plan, bias=None, act=None, slope=None):
    """Launch the kernel: c = act(a @ b + bias), and the slope of act."""
    plan = dict(plan)
    programs_per_sm = plan.pop("PROGRAMS_PER_SM")
    M, K = a.shape
    N = b.shape[1]
    width = plan["TILE_N"]
    if plan["HALVES"]:
        width //= 2
    a_desc, a_transposed = linear_descriptor(a, plan["TILE_M"], plan["TILE_K"])
    b_desc, b_transposed = linear_descriptor(b, plan["TILE_K"], plan["TILE_N"])
    c_desc = None
    if plan["PARTS"] == 1 and lies_in_rows(c):
        c_desc, _ = linear_descriptor(c, plan["TILE_M"], width)
    slope_desc = None
    if slope is not None:
        slope_desc, _ = linear_descriptor(slope, plan["TILE_M"], width)
    tiles = triton.cdiv(M, plan["TILE_M"]) * triton.cdiv(N, plan["TILE_N"])
    programs = tiles * plan["PARTS"]
    if plan["STAY"]:
        programs = min(programs, LINEAR_NUM_SMS * programs_per_sm)
    _product[(programs,)](
        a_desc=a_desc,
        b_desc=b_desc,
        c_desc=c_desc,
        c_ptr=c if c_desc is None else None,
        bias_ptr=bias,
        slope_desc=slope_desc,
        M=M,
        N=N,
        K=K,
        ACT=act,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        DIVIDED=plan["PARTS"] > 1,
        **plan,
    )


ACTIVATIONS = {None: None, "relu": _relu, "gelu": _linear_gelu, "silu": _silu}


LINEAR_TILES = {
    # precision: rows, columns, features of a step, warps, stages
    "16 bits": (
        (128, 256, 64, 8, 4),
        (128, 128, 64, 4, 6),
        (64, 128, 128, 4, 4),
        (64, 64, 128, 4, 6),
    ),
    "tf32": ((128, 128, 32, 8, 4), (64, 64, 32, 4, 4)),
    "ieee": ((64, 64, 16, 4, 4),),
}
# Rows of a result that are not aligned take more registers to store.
TILE_OF_ODD_ROWS = 128, 128, 64, 8, 4
# Without a TMA, threads compute an address for each number.
TILE_BEFORE_H100 = 64, 64, 32, 4, 4
# Operations of an SM in a µs.
OPERATIONS = {"16 bits": 6.0e6, "tf32": 3.0e6, "ieee": 0.4e6}


def precision_of(dtype):
    if dtype != torch.float32:
        return "16 bits"
    # PyTorch's switch: whether Tensor Cores may cut float32.
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def tiles_for(precision, aligned):
    """Tiles that a product may take."""
    if precision != "ieee" and LINEAR_SHARED < 200_000:
        return (TILE_BEFORE_H100,)
    if precision == "16 bits" and not aligned:
        return (TILE_OF_ODD_ROWS, *LINEAR_TILES[precision][2:])
    return LINEAR_TILES[precision]


def estimate(M, N, K, precision, tile, parts):
    """How many µs a product takes, roughly."""
    rows, columns, features, _, _ = tile
    itemsize = 2 if precision == "16 bits" else 4
    # How many programs have work, and how many rounds that takes.
    programs = triton.cdiv(M, rows) * triton.cdiv(N, columns) * parts
    rounds = triton.cdiv(programs, LINEAR_NUM_SMS)
    # A step: its products, and its loads from L2, which gives 12 000 GB/s to
    # all SMs together, and 120 GB/s to one of them.
    steps = triton.cdiv(triton.cdiv(K, features), parts)
    products = 2 * rows * columns * features / OPERATIONS[precision]
    from_l2 = min(12e6 / min(programs, LINEAR_NUM_SMS), 120e3)
    loads = itemsize * (rows + columns) * features / from_l2
    # Then the tile is stored, 30 000 numbers in a µs.
    store = rows * columns / 30e3
    on_sms = rounds * (steps * max(products, loads) + store)
    # With few tokens DRAM takes longer. It gives 4200 GB/s to all SMs
    # together, and 40 GB/s to one of them.
    read = itemsize * K * (M + N)
    from_dram = read / min(40e3 * programs, 4.2e6)
    # Most of the shorter time is hidden by the longer one.
    time = max(on_sms, from_dram) + 0.3 * min(on_sms, from_dram)
    if parts > 1:
        # A second kernel adds them up. They are written and read once, as
        # float32, and a µs has room for 2.3 MB of that.
        time += 5 + 8 * parts * M * N / 2.3e6
    return time


@functools.cache
def tile_and_parts(M, N, K, precision, aligned, most_parts):
    """The choice with the shortest time; each part has four steps at least."""
    choices = [
        (tile, parts)
        for tile in tiles_for(precision, aligned)
        for parts in range(1, 33)
        if parts == 1 or parts <= min(most_parts, K // tile[2] // 4)
    ]
    return min(
        choices, key=lambda choice: estimate(M, N, K, precision, *choice)
    )


def plan_product(M, N, K, dtype, aligned=True, act=None, most_parts=32):
    """Tiles of a product, and into how many parts K is divided."""
    precision = precision_of(dtype)
    tile, parts = tile_and_parts(M, N, K, precision, aligned, most_parts)
    programs_per_sm = 1
    # On an H200 two programs are faster for sums of up to 1024 features, and
    # for longer ones where there are three times as many new features.
    short = max(1024, N // 3) >= K
    if act is not None and short and tile == LINEAR_TILES["16 bits"][0]:
        tile = LINEAR_TILES["16 bits"][1]
        programs_per_sm = 2
    tile_m, tile_n, tile_k, warps, stages = tile
    steps = triton.cdiv(K, tile_k)
    steps_of_a_part = triton.cdiv(steps, parts)
    # As many stages as there is room for, beside half a tile of results.
    stage = (tile_m + tile_n) * tile_k * dtype.itemsize
    room = LINEAR_SHARED // programs_per_sm - 1024
    room -= tile_m * tile_n // 2 * dtype.itemsize
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 8,
        "STAGES": max(1, min(stages, room // stage)),
        "STAY": True,
        "HALVES": True,
        "PARTS": triton.cdiv(steps, steps_of_a_part),
        "K_PART": steps_of_a_part * tile_k,
        "PRECISION": "tf32" if precision == "tf32" else "ieee",
        "PROGRAMS_PER_SM": programs_per_sm,
        "num_warps": warps,
    }


@triton.jit
def _add_parts(
    parts_ptr,  # (parts, size), float32
    c_ptr,  # (size,): rows of N numbers
    bias_ptr,  # (N,), or None
    slope_ptr,  # rows of N numbers, or None
    parts,
    size,
    N,
    slope_stride,  # from a row of slopes to the next
    ACT: tl.constexpr,
    ROWS: tl.constexpr,  # parts of a step
    COLUMNS: tl.constexpr,  # numbers of a program
):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < size
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        mask = (part[:, None] < parts) & inside[None, :]
        place = part.to(tl.int64)[:, None] * size + at[None, :]
        sums += tl.load(parts_ptr + place, mask=mask, other=0)
    total = tl.sum(sums, axis=0)

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at % N, mask=inside, other=0)
        total += bias.to(tl.float32)
    if ACT is not None:
        total, slope = ACT(total)
        if slope_ptr is not None:
            place = at // N * slope_stride + at % N
            tl.store(slope_ptr + place, slope, mask=inside)
    tl.store(c_ptr + at, total, mask=inside)


def add_parts(parts, c, bias=None, act=None, slope=None):
    """c = act(the sum of its parts + bias), and the slope of act."""
    slope_stride = 0
    if slope is not None:
        slope_stride = slope.stride(0)
    rows = min(32, triton.next_power_of_2(parts.shape[0]))
    columns = 1024 // rows
    _add_parts[(triton.cdiv(c.numel(), columns),)](
        parts_ptr=parts,
        c_ptr=c,
        bias_ptr=bias,
        slope_ptr=slope,
        parts=parts.shape[0],
        size=c.numel(),
        N=c.shape[-1],
        slope_stride=slope_stride,
        ACT=act,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )


def product(a, b, c, bias=None, act=None, slope=None, most_parts=32):
    """c = act(a @ b + bias), in as many parts as the plan says."""
    M, K = a.shape
    N = b.shape[1]
    plan = plan_product(M, N, K, a.dtype, lies_in_rows(c), act, most_parts)
    if plan["PARTS"] == 1:
        launch(a, b, c, plan, bias, act, slope)
        return
    parts = torch.empty(
        plan["PARTS"], *c.shape, dtype=torch.float32, device=c.device
    )
    launch(a, b, parts, plan)
    add_parts(parts, c, bias, act, slope)


def linear_forward(x, w, bias=None, act=None, keeps_slope=False, most_parts=32):
    """y, and the slope of the activation if it is kept."""
    y = torch.empty(
        x.shape[0], w.shape[0], dtype=x.dtype, device=x.device
    )  # fmt: skip
    slope = None
    if keeps_slope:
        slope = padded(*y.shape, dtype=x.dtype, device=x.device)
    product(x, w.T, y, bias, act, slope, most_parts)
    return y, slope


@triton.jit
def _times_slope(dy, slope):
    return dy * slope


@triton.jit
def _where_positive(dy, y):
    return tl.where(y > 0, dy, 0.0)


CHAINS = {
    None: None,
    "relu": _where_positive,
    "gelu": _times_slope,
    "silu": _times_slope,
}


@triton.jit
def _own_pass(
    dy_desc,  # (M, N) in tiles of TILE_M and TILE_N
    saved_desc,  # as dy_desc; or None: then dz is dy
    dz_desc,  # as dy_desc; or None, if dz is dy
    sums_ptr,  # (strips, N), float32: parts of db; or None
    N,
    CHAIN: tl.constexpr,  # what makes dz of dy and of what was saved
    TILE_M: tl.constexpr,  # tokens of a step
    TILE_N: tl.constexpr,  # new features of a program
    STEPS: tl.constexpr,  # how many tiles a program has, one below the other
    STAGES: tl.constexpr,
):
    columns = tl.cdiv(N, TILE_N)
    strip = tl.program_id(0) // columns
    start = tl.program_id(0) % columns * TILE_N
    sums = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = (strip * STEPS + step) * TILE_M
        dz = dy_desc.load([row, start])
        if saved_desc is not None:
            saved = saved_desc.load([row, start])
            dz = CHAIN(dz, saved).to(dy_desc.dtype)
            dz_desc.store([row, start], dz)
        # Tokens that do not exist have a dy of 0.
        sums += dz.to(tl.float32)
    if sums_ptr is not None:
        feature = start + tl.arange(0, TILE_N)
        place = strip.to(tl.int64) * N + feature
        tl.store(sums_ptr + place, tl.sum(sums, axis=0), mask=feature < N)


def new_dz(dy):
    return padded(*dy.shape, dtype=dy.dtype, device=dy.device)


def new_sums(rows, dy):
    """Room for the parts of db."""
    shape = (rows, dy.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=dy.device)


def dz_in_a_pass(dy, saved, chain, wants_db):
    """dz, and the parts of db if it is wanted, by a kernel of their own."""
    if saved is None and not wants_db:
        return dy, None
    tile = 64, 64
    steps = 2
    M, N = dy.shape
    strips = triton.cdiv(M, tile[0] * steps)
    dz = dy
    saved_desc = None
    dz_desc = None
    if saved is not None:
        dz = new_dz(dy)
        saved_desc, _ = linear_descriptor(saved, *tile)
        dz_desc, _ = linear_descriptor(dz, *tile)
    sums = None
    if wants_db:
        sums = new_sums(strips, dy)
    dy_desc, _ = linear_descriptor(dy, *tile)
    _own_pass[(strips * triton.cdiv(N, tile[1]),)](
        dy_desc=dy_desc,
        saved_desc=saved_desc,
        dz_desc=dz_desc,
        sums_ptr=sums,
        N=N,
        CHAIN=chain,
        TILE_M=tile[0],
        TILE_N=tile[1],
        STEPS=steps,
        # Two stages have one slot: the second tile is requested when the
        # first one has left it, while its dz is on the way out.
        STAGES=2,
        num_warps=4,
    )
    return dz, sums


def linear_backward(dy, x, w, saved, chain, wants):
    """dx, dw and db, those that are wanted."""
    wants_dx, wants_dw, wants_db = wants
    M, N = dy.shape
    K = w.shape[1]
    dz, sums = dz_in_a_pass(dy, saved, chain, wants_db)
    dx = None
    if wants_dx:
        dx = torch.empty(M, K, dtype=dy.dtype, device=dy.device)
        product(dz, w, dx)
    dw = None
    if wants_dw:
        dw = torch.empty(N, K, dtype=dy.dtype, device=dy.device)
        product(dz.T, x, dw)
    db = None
    if wants_db:
        db = torch.empty(N, dtype=dy.dtype, device=dy.device)
        add_parts(sums, db)
    return dx, dw, db


def linear_for_descriptors(t, transposed_too=True):
    """The matrix, or a copy of it in a layout that a descriptor takes."""
    if lies_in_rows(t) or (transposed_too and lies_in_rows(t.T)):
        return t
    return padded(*t.shape, dtype=t.dtype, device=t.device).copy_(t)


def linear_check_arguments(input, weight, bias, activation):
    """Raise an error that names the wrong argument, and says why."""
    named = {"input": input, "weight": weight, "bias": bias}
    named = {name: t for name, t in named.items() if t is not None}
    for name, t in named.items():
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"{name} has {t.dtype}: float16, bfloat16 and float32 are "
                "taken"
            )
        if t.dtype != input.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and input has {input.dtype}: they "
                "must be the same"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    if input.dim() == 0:
        raise ValueError("input has no dimension: the last one has features")
    if weight.dim() != 2:
        raise ValueError(
            f"weight has {weight.dim()} dimensions, not 2: new features and "
            "old ones"
        )
    if weight.numel() == 0:
        raise ValueError(
            f"weight is {tuple(weight.shape)}: a feature is needed on each "
            "side"
        )
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has {input.shape[-1]} features, and weight takes "
            f"{weight.shape[1]}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias is {tuple(bias.shape)}, and weight makes "
            f"{weight.shape[0]} features"
        )
    if activation not in ACTIVATIONS:
        names = ", ".join(str(name) for name in ACTIVATIONS)
        raise ValueError(f"activation is {activation!r}: {names} are taken")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, activation, trains):
        ctx.activation = activation
        ctx.shapes = x.shape, weight.shape
        if x.shape[0] == 0:
            return x.new_empty(0, weight.shape[0])
        x = linear_for_descriptors(x)
        w = linear_for_descriptors(weight)
        if bias is not None:
            bias = bias.contiguous()
        keeps_slope = trains and activation in ("gelu", "silu")
        act = ACTIVATIONS[activation]
        y, saved = linear_forward(x, w, bias, act, keeps_slope)
        if activation == "relu":
            saved = y
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None,
            w if ctx.needs_input_grad[0] else None,
            saved,
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        wants = ctx.needs_input_grad[:3]
        (M, K), (N, _) = ctx.shapes
        if M == 0:
            shapes = (0, K), (N, K), (N,)
            grads = [
                dy.new_zeros(shape) if want else None
                for shape, want in zip(shapes, wants, strict=True)
            ]
            return *grads, None, None
        x, w, saved = ctx.saved_tensors
        if w is None:
            w = dy.new_empty(N, K)  # for its shape alone
        dy = linear_for_descriptors(dy, transposed_too=False)
        if saved is not None:
            saved = linear_for_descriptors(saved, transposed_too=False)
        chain = CHAINS[ctx.activation]
        return *linear_backward(dy, x, w, saved, chain, wants), None, None


def linear(input, weight, bias=None, activation=None):
    """What F.linear(input, weight, bias) gives, and then an activation.

    input is (..., K), weight is (N, K), bias is (N,) or None. All have
    float16, all bfloat16, or all float32. activation is None, "relu", "gelu"
    (the form with tanh), or "silu".
    """
    linear_check_arguments(input, weight, bias, activation)
    given = [t for t in (input, weight, bias) if t is not None]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    dtype = input.dtype
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        input, weight = input.float(), weight.float()
        bias = None if bias is None else bias.float()
    x = input.reshape(-1, input.shape[-1])
    y = _Linear.apply(x, weight, bias, activation, trains)
    return y.reshape(*input.shape[:-1], weight.shape[0]).to(dtype)


# matrix-products/02-swiglu ----------------------------------------------------
# Gives swiglu, geglu, gated.


@triton.jit
def _gate_gelu(x):
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    # Beyond 30 the second term is 0; infinity times 0 would not be.
    return x * below, below + tl.where(tl.abs(x) < 30, x * density, 0.0)


@triton.jit
def _reciprocal(x):
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",  # one result and one argument, both in registers
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1 / x


@triton.jit
def _power_of_two(x):
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp2(x)


@triton.jit
def _gelu_short(x):
    if x.dtype == tl.float64:
        return _gate_gelu(x)
    t = _reciprocal(1 + 0.2316419 * tl.abs(x))
    # exp(-x x / 2) is a power of two: log2(e) / 2 is 0.7213... Then
    # 1 / sqrt(2 pi) is 0.3989...
    density = _power_of_two(-0.7213475204444817 * x * x) * 0.3989422804014327
    # b1 t + ... + b5 t^5, from the last to the first: without a power.
    series = 1.330274429 * t - 1.821255978
    series = series * t + 1.781477937
    series = series * t - 0.356563782
    series = series * t + 0.319381530
    beyond = density * (series * t)
    below = tl.where(x < 0, beyond, 1 - beyond)
    # Beyond 30 the second term is 0; infinity times 0 would not be.
    return x * below, below + tl.where(tl.abs(x) < 30, x * density, 0.0)


@triton.jit
def _gelu_tanh(x):
    near = tl.minimum(tl.maximum(x, -30.0), 30.0)
    square = near * near
    # v, and its derivative times x. 2 sqrt(2 / pi) is 1.5957..., and times
    # 0.044715 it is 0.0713...; three times that is 0.2140...
    v = near * (1.5957691216057308 + 0.07135481627260025 * square)
    dv = near * (1.5957691216057308 + 0.21406444881780076 * square)
    sigmoid = _sigmoid(v)
    return x * sigmoid, sigmoid * (1 + dv * (1 - sigmoid))


@triton.jit
def _place_of_tile(
    M,
    N,
    ONE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows and columns of our tile, and which of its elements exist."""
    # In 64 bits, for M * N may pass 2**31.
    row = tl.arange(0, ROWS)[:, None].to(tl.int64)
    tile = tl.program_id(0)
    if not ONE_ROW:
        across = tl.cdiv(N, COLUMNS)  # tiles side by side
        row += (tile // across).to(tl.int64) * ROWS
        tile = tile % across
    column = tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < M) & (column < N)


@triton.jit
def _gate_fwd(
    gate_ptr,  # (M, N): the numbers of a row lie side by side
    up_ptr,  # the same
    y_ptr,  # the same
    gate_stride,  # from a row of the gate to the next
    up_stride,
    y_stride,
    M,  # rows
    N,  # columns
    ACT: tl.constexpr,  # the activation: its value and its slope
    ONE_ROW: tl.constexpr,  # whether M is 1
    ROWS: tl.constexpr,  # rows of a program
    COLUMNS: tl.constexpr,  # columns of a program
):
    row, column, mask = _place_of_tile(M, N, ONE_ROW, ROWS, COLUMNS)

    # Both loads stand before the first use of either.
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0)

    # 16-bit numbers are computed in float32, and rounded once, at the end.
    wide: tl.constexpr = gate.dtype == tl.float64
    acc: tl.constexpr = tl.float64 if wide else tl.float32
    value, _ = ACT(gate.to(acc))
    y = value * up.to(acc)
    tl.store(y_ptr + row * y_stride + column, y, mask=mask)


TILE_BYTES = 1024  # of each matrix
WARPS = 2


def tile_for(N, itemsize):
    """Rows, columns and warps of a program."""
    numbers = TILE_BYTES // itemsize
    columns = min(triton.next_power_of_2(N), numbers)
    return {
        "ROWS": numbers // columns,
        "COLUMNS": columns,
        "num_warps": WARPS,
    }


def rows_and_columns(matrices):
    """M and N of matrices of one shape; one row if all are contiguous."""
    M, N = matrices[0].shape
    if all(t.is_contiguous() for t in matrices):
        return 1, M * N
    return M, N


def gate_forward(gate, up, y, function):
    """Fill y. All three are matrices with the numbers of a row side by
    side."""
    if y.numel() == 0:
        return
    M, N = rows_and_columns((gate, up, y))
    tile = tile_for(N, y.itemsize)
    across = triton.cdiv(N, tile["COLUMNS"])
    _gate_fwd[(triton.cdiv(M, tile["ROWS"]) * across,)](
        gate_ptr=gate,
        up_ptr=up,
        y_ptr=y,
        gate_stride=gate.stride(0),
        up_stride=up.stride(0),
        y_stride=y.stride(0),
        M=M,
        N=N,
        ACT=function,
        ONE_ROW=M == 1,
        **tile,
    )


@triton.jit
def _gate_bwd(
    dy_ptr,  # (M, N): the numbers of a row lie side by side, here and below
    gate_ptr,  # (M, N), from the forward pass
    up_ptr,  # (M, N), from the forward pass
    dgate_ptr,  # (M, N), or None if nobody wants it
    dup_ptr,  # the same
    y_ptr,  # (M, N), or None: y is computed again
    dy_stride,  # from a row to the next
    gate_stride,
    up_stride,
    grad_stride,  # of dgate and of dup
    y_stride,
    M,
    N,
    ACT: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask = _place_of_tile(M, N, ONE_ROW, ROWS, COLUMNS)

    # Three loads before the first use.
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0)

    wide: tl.constexpr = gate.dtype == tl.float64
    acc: tl.constexpr = tl.float64 if wide else tl.float32
    dy = dy.to(acc)
    up = up.to(acc)
    value, slope = ACT(gate.to(acc))

    at = row * grad_stride + column
    if dgate_ptr is not None:
        tl.store(dgate_ptr + at, dy * up * slope, mask=mask)
    if dup_ptr is not None:
        tl.store(dup_ptr + at, dy * value, mask=mask)
    if y_ptr is not None:
        tl.store(y_ptr + row * y_stride + column, value * up, mask=mask)


def gate_backward(dy, gate, up, dgate, dup, function, y=None):
    """Fill dgate, dup and y, matrices as in the forward pass, or None."""
    written = [t for t in (dgate, dup, y) if t is not None]
    if dy.numel() == 0 or not written:
        return
    M, N = rows_and_columns((dy, gate, up, *written))
    grad = dup if dgate is None else dgate
    tile = tile_for(N, dy.itemsize)
    across = triton.cdiv(N, tile["COLUMNS"])
    _gate_bwd[(triton.cdiv(M, tile["ROWS"]) * across,)](
        dy_ptr=dy,
        gate_ptr=gate,
        up_ptr=up,
        dgate_ptr=dgate,
        dup_ptr=dup,
        y_ptr=y,
        dy_stride=dy.stride(0),
        gate_stride=gate.stride(0),
        up_stride=up.stride(0),
        grad_stride=0 if grad is None else grad.stride(0),
        y_stride=0 if y is None else y.stride(0),
        M=M,
        N=N,
        ACT=function,
        ONE_ROW=M == 1,
        **tile,
    )


def halves(t):
    """The left and the right half of a matrix, as views."""
    N = t.shape[1] // 2
    return t[:, :N], t[:, N:]


def in_rows(t):
    """The matrix, or a copy, with the numbers of each row side by side."""
    if t.stride(1) == 1 or t.shape[1] == 1:
        return t
    return t.contiguous()


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, function):
        """Matrices; without up, gate has both halves."""
        ctx.save_for_backward(gate, up)
        ctx.function = function
        if up is None:
            gate, up = halves(gate)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        gate_forward(gate, up, y, function)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        wants_dgate, wants_dup, _ = ctx.needs_input_grad
        dy = in_rows(dy)
        like = {"dtype": dy.dtype, "device": dy.device}
        if up is None:
            # One gradient, and the kernel writes into its halves.
            dx = torch.empty(gate.shape, **like)
            gate_backward(dy, *halves(gate), *halves(dx), ctx.function)
            return dx, None, None
        dgate = None
        dup = None
        if wants_dgate:
            dgate = torch.empty(gate.shape, **like)
        if wants_dup:
            dup = torch.empty(up.shape, **like)
        gate_backward(dy, gate, up, dgate, dup, ctx.function)
        return dgate, dup, None


def gate_check_arguments(gate, up):
    """Raise an error that names the wrong argument, and says why."""
    named = {"gate": gate}
    if up is not None:
        named["up"] = up
    for name, t in named.items():
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(
                f"{name} has {t.dtype}: floats of 16 bits or more are taken"
            )
        if t.dtype != gate.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and gate has {gate.dtype}: they must "
                "be the same"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    if up is not None and up.shape != gate.shape:
        raise ValueError(
            f"up is {tuple(up.shape)}, and gate is {tuple(gate.shape)}: they "
            "must be the same"
        )
    if up is None and (gate.dim() == 0 or gate.shape[-1] % 2):
        raise ValueError(
            f"gate is {tuple(gate.shape)}: without up it has both halves, so "
            "its last dimension must be even"
        )


def as_matrix(t):
    """Rows of the last dimension, each with its numbers side by side: a view
    where that is possible."""
    columns = t.shape[-1] if t.dim() else 1
    rows = t.shape[:-1].numel()
    return in_rows(t.reshape(rows, columns))


def gated(gate, up, function):
    """An activation of gate, times up; both passes run in Triton."""
    gate_check_arguments(gate, up)
    shape = gate.shape
    if up is None:
        shape = (*shape[:-1], shape[-1] // 2)
    else:
        up = as_matrix(up)
    return _Gated.apply(as_matrix(gate), up, function).reshape(shape)


def swiglu(gate, up=None):
    """What F.silu(gate) * up gives.

    Both have the same shape and the same type, of 16 bits or more. Without
    up, the last dimension of gate holds both, first the gate.
    """
    return gated(gate, up, _silu)


def geglu(gate, up=None, approximate="none"):
    """What F.gelu(gate, approximate=approximate) * up gives; see swiglu."""
    functions = {"none": _gelu_short, "tanh": _gelu_tanh}
    if approximate not in functions:
        raise ValueError(
            f"approximate is {approximate!r}: 'none' and 'tanh' are taken"
        )
    return gated(gate, up, functions[approximate])


# norms-and-losses/04-cross-entropy --------------------------------------------
# Gives cross_entropy.


LOSS_LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _merge(m1, s1, m2, s2):
    """The pair of two parts of a row."""
    m = tl.maximum(m1, m2)
    s1 *= tl.exp2((m1 - m) * LOSS_LOG2E)
    s2 *= tl.exp2((m2 - m) * LOSS_LOG2E)
    return m, s1 + s2


@triton.jit
def _groups_of(
    row,
    N: tl.constexpr,  # columns
    GROUP: tl.constexpr,  # columns of 16 bytes
):
    """Where the first group of a row is in memory; how many columns stand
    before it; and how many groups there are."""
    first = tl.cast(row, tl.int64) * N  # M * N may pass 2**31
    start = (first + GROUP - 1) // GROUP * GROUP
    head = (start - first).to(tl.int32)
    # A row may be so narrow that it has no group.
    return start, head, tl.maximum(N - head, 0) // GROUP


@triton.jit
def _block(
    first,  # the first group of the block
    groups,  # how many groups there are; None: all of the block exist
    THREADS: tl.constexpr,
    GROUP: tl.constexpr,
    LOADS: tl.constexpr,  # groups of a thread
):
    """A block: its columns, one tile for each load; which of them exist; and
    where it begins and ends."""
    cols = ()
    masks = ()
    for i in tl.static_range(LOADS):
        group = first + i * THREADS + tl.arange(0, THREADS)[:, None]
        cols += (group * GROUP + tl.arange(0, GROUP)[None, :],)
        if groups is None:
            masks += (tl.full((THREADS, 1), True, tl.int1),)
        else:
            masks += (group < groups,)
    begin = first * GROUP
    return cols, masks, begin, begin + LOADS * THREADS * GROUP


@triton.jit
def _edges(
    head,  # columns before the first group
    groups,  # of the row
    N: tl.constexpr,
    THREADS: tl.constexpr,  # at least twice as many as GROUP
    GROUP: tl.constexpr,
):
    """Both edges of a row as one block, with a column for each thread."""
    i = tl.arange(0, THREADS)[:, None]
    # The first threads have the columns -GROUP to -1, and as many threads
    # after them have those behind the last group.
    col = i - GROUP + tl.where(i < GROUP, 0, groups * GROUP)
    exists = (i < 2 * GROUP) & (col >= -head) & (col < N - head)
    return (col,), (exists,), -head, N - head


@triton.jit
def _loss_load(
    x_ptr,  # where the first group is
    block,
    HINT: tl.constexpr,  # what the caches should do
):
    """The logits of a block, one tile for each load."""
    cols, masks, _, _ = block
    xs = ()
    for i in tl.static_range(len(cols)):
        x = tl.load(
            x_ptr + cols[i],
            mask=masks[i],
            other=float("-inf"),
            eviction_policy=HINT,
        )
        xs += (x,)
    return xs


@triton.jit
def _add(
    xs,  # the logits of a block, from _load
    block,
    w_ptr,  # weights, from the first group on; None: all are 1
    m,  # (THREADS,): the largest so far
    s,  # (THREADS,): the sum of exp(x - m) so far
    sum_x,  # (THREADS,): the sum of the weighted logits so far
    SMOOTH: tl.constexpr,  # label smoothing
):
    """Add a block to the three numbers of each thread."""
    cols, masks, _, _ = block
    new = m
    for i in tl.static_range(len(xs)):
        new = tl.maximum(new, tl.max(xs[i].to(tl.float32), axis=1))

    # The sum so far was about the old maximum.
    s *= tl.exp2((m - new) * LOSS_LOG2E)
    for i in tl.static_range(len(xs)):
        x = xs[i].to(tl.float32)
        s += tl.sum(tl.exp2((x - new[:, None]) * LOSS_LOG2E), axis=1)
        if SMOOTH > 0:
            if w_ptr is not None:
                x *= tl.load(w_ptr + cols[i], mask=masks[i])
            sum_x += tl.sum(tl.where(masks[i], x, 0), axis=1)
    return new, s, sum_x


@triton.jit
def _sums(
    x_ptr,  # where the first group is
    w_ptr,
    place,  # columns before the first group of the row; groups to sweep over;
    # whether to read both edges, too; all groups of the row
    N: tl.constexpr,
    SMOOTH: tl.constexpr,
    THREADS: tl.constexpr,
    GROUP: tl.constexpr,
    LOADS: tl.constexpr,
    FULL: tl.constexpr,  # so many groups, in whole blocks, need no mask
    HINT: tl.constexpr,
):
    """Maximum, sum of exponentials, and sum of the weighted logits."""
    STEP: tl.constexpr = THREADS * LOADS
    head, groups, edges, groups_of_row = place
    m = tl.full((THREADS,), LOWEST, tl.float32)
    s = tl.zeros((THREADS,), tl.float32)
    sum_x = tl.zeros((THREADS,), tl.float32)

    # Groups that need a mask.
    for first in tl.range(FULL, groups, STEP, num_stages=1):
        block = _block(first, groups, THREADS, GROUP, LOADS)
        xs = _loss_load(x_ptr, block, HINT)
        m, s, sum_x = _add(xs, block, w_ptr, m, s, sum_x, SMOOTH)

    # All others. There are none if the row is left out.
    for i in tl.range(0, tl.minimum(groups, FULL), STEP, num_stages=1):
        block = _block(FULL - STEP - i, None, THREADS, GROUP, LOADS)
        xs = _loss_load(x_ptr, block, HINT)
        m, s, sum_x = _add(xs, block, w_ptr, m, s, sum_x, SMOOTH)

    if edges:
        outer = _edges(head, groups_of_row, N, THREADS, GROUP)
        xs_outer = _loss_load(x_ptr, outer, HINT)
        m, s, sum_x = _add(xs_outer, outer, w_ptr, m, s, sum_x, SMOOTH)

    # The three numbers of each thread become those of the program.
    m, s = tl.reduce((m, s), 0, _merge)
    return m, s, tl.sum(sum_x)


@triton.jit
def _target(
    target_ptr,  # (M,)
    w_ptr,  # (N + 1,): weights and their sum; None: all are 1
    row,
    ignore,  # the target that does not count
    N: tl.constexpr,
):
    """The target of a row; whether it counts; whether it is a class; its
    weight; and the sum of all weights."""
    t = tl.load(target_ptr + row)
    live = t != ignore
    exists = (t >= 0) & (t < N)
    w_t = 1.0
    sum_w = N
    if w_ptr is not None:
        w_t = tl.load(w_ptr + t, mask=exists, other=0)
        sum_w = tl.load(w_ptr + N)
    w_t = tl.where(live, tl.where(exists, w_t, float("nan")), 0.0)
    return t, live, exists, w_t, sum_w


@triton.jit
def _keep(
    rows_ptr,  # (4, M), at this row
    M,
    mine,  # whether to store anything
    live,
    x_t,  # the logit of the target
    w_t,
    sum_w,
    sums,  # maximum, sum of exponentials, sum of the weighted logits
    N: tl.constexpr,
    SMOOTH: tl.constexpr,
    Z: tl.constexpr,  # the factor of the z-loss
):
    """Store loss, weight, maximum and sum of a row; return the last two."""
    m, s, sum_x = sums
    log = tl.log(s)
    lse = m + log
    # First the difference of two logits, which may be large, and then the
    # logarithm, which is small.
    loss = (1 - SMOOTH) * w_t * (m - x_t + log)
    if SMOOTH > 0:
        loss += SMOOTH / N * (sum_w * lse - sum_x)
    loss += Z * lse * lse
    # Of a row that is ignored, all exponentials are to be 0.
    m = tl.where(live, m, float("inf"))
    s = tl.where(live, s, 1)
    tl.store(rows_ptr, tl.where(live, loss, 0), mask=mine)
    tl.store(rows_ptr + M, w_t, mask=mine)
    tl.store(rows_ptr + 2 * M, m, mask=mine)
    tl.store(rows_ptr + 3 * M, s, mask=mine)
    return m, s


@triton.jit
def _cross_entropy_fwd(
    x_ptr,  # (M, N): logits, contiguous
    target_ptr,  # (M,): classes
    w_ptr,  # (N + 1,): weights in float32 and their sum; None: all are 1
    rows_ptr,  # (4, M): loss, weight, maximum and sum of each row
    M,  # rows
    ignore,  # the target that does not count
    SMOOTH: tl.constexpr,  # label smoothing
    Z: tl.constexpr,  # the factor of the z-loss
    N: tl.constexpr,  # classes
    GROUP: tl.constexpr,  # columns of 16 bytes
    THREADS: tl.constexpr,  # of a program
    LOADS: tl.constexpr,  # groups that a thread loads at a time
    FULL: tl.constexpr,  # so many groups, in whole blocks, need no mask
):
    row = tl.program_id(0)
    start, head, groups = _groups_of(row, N, GROUP)
    t, live, exists, w_t, sum_w = _target(target_ptr, w_ptr, row, ignore, N)

    # From here on, columns are counted from the first group.
    x_ptr += start
    w_ptr = None if w_ptr is None else w_ptr + head
    x_t = tl.load(x_ptr + (t - head), mask=exists, other=0).to(tl.float32)

    # A row that is ignored need not be read.
    place = (head, tl.where(live, groups, 0), N % GROUP > 0, groups)
    sums = _sums(
        x_ptr, w_ptr, place, N, SMOOTH, THREADS, GROUP, LOADS, FULL, ""
    )
    _keep(rows_ptr + row, M, None, live, x_t, w_t, sum_w, sums, N, SMOOTH, Z)


CUDA = ON_GPU and torch.version.hip is None
WARP = 32 if ON_GPU else 1  # threads; without a GPU small rows have blocks


def threads_of(warps):
    """Threads of a program: enough for both edges."""
    return max(WARP * warps, 16)


def cut(N, group, slices, block):
    """How many slices a row really has; how many groups a slice has; and how
    many of them, in whole blocks, exist in each slice of each row."""
    most = max(N // group, 1)
    width = triton.cdiv(most, slices)
    slices = triton.cdiv(most, width)
    least = N // group  # groups of a row
    if N % group > 0:
        least = (N - group + 1) // group  # the first one may begin late
    least -= (slices - 1) * width  # groups of the last slice
    full = max(min(least, width), 0) // block * block
    return slices, width, full


def loss_plan_forward(smooth, weighted):
    """Warps of a program, and groups that a thread loads at a time."""
    if smooth > 0 and not weighted:
        return 4, 4
    return 4, 2


def loss_forward(x, target, w=None, ignore=-100, smooth=0.0, z=0.0):
    """Loss, weight, maximum and sum of each row, as a (4, M) tensor.

    x is a contiguous matrix, and w has the weights in float32 and their sum.
    """
    M, N = x.shape
    group = 16 // x.itemsize
    warps, loads = loss_plan_forward(smooth, w is not None)
    threads = threads_of(warps)
    _, _, full = cut(N, group, slices=1, block=threads * loads)
    rows = torch.empty(4, M, device=x.device)
    _cross_entropy_fwd[(M,)](
        x_ptr=x,
        target_ptr=target,
        w_ptr=w,
        rows_ptr=rows,
        M=M,
        ignore=ignore,
        SMOOTH=smooth,
        Z=z,
        N=N,
        GROUP=group,
        THREADS=threads,
        LOADS=loads,
        FULL=full,
        num_warps=warps,
    )
    return rows


@triton.jit
def _write(
    xs,  # the logits of a block
    block,
    dx_ptr,  # gradients, from the first group on
    w_ptr,
    hot,  # the column of the target, counted from the first group
    m,
    p,  # the factor of the exponentials
    a,  # what is subtracted at the target
    e,  # what is subtracted everywhere, times the weight
    SMOOTH: tl.constexpr,
):
    """Store the gradients of a block."""
    cols, masks, begin, end = block
    for i in tl.static_range(len(xs)):
        dx = tl.exp2((xs[i].to(tl.float32) - m) * LOSS_LOG2E) * p
        if SMOOTH > 0:
            if w_ptr is None:
                dx -= e
            else:
                dx -= e * tl.load(w_ptr + cols[i], mask=masks[i])
        if (hot >= begin) & (hot < end):
            dx -= tl.where(cols[i] == hot, a, 0)
        tl.store(dx_ptr + cols[i], dx, mask=masks[i])


@triton.jit
def _factors(
    g_ptr,  # the gradient of the loss of this row
    live,
    w_t,
    sum_w,
    m,
    s,
    N: tl.constexpr,
    SMOOTH: tl.constexpr,
    Z: tl.constexpr,
):
    """p, a and e of a row, see the formula; p is divided by s already."""
    g = tl.where(live, tl.load(g_ptr).to(tl.float32), 0)
    lse = tl.where(live, m + tl.log(s), 0)
    a = g * (1 - SMOOTH) * w_t
    e = g * (SMOOTH / N)
    p = (a + e * sum_w + g * (2 * Z) * lse) / s
    return p, a, e


@triton.jit
def _cross_entropy_bwd(
    x_ptr,  # (M, N): logits, contiguous
    target_ptr,  # (M,): classes
    w_ptr,  # (N + 1,): weights in float32 and their sum; None: all are 1
    rows_ptr,  # (4, M): from the forward pass
    g_ptr,  # the gradients of the losses
    g_stride,  # from one to the next; 0 if all rows have the same
    dx_ptr,  # (M, N); may be x
    M,  # rows
    ignore,  # the target that does not count
    SMOOTH: tl.constexpr,  # label smoothing
    Z: tl.constexpr,  # the factor of the z-loss
    N: tl.constexpr,  # classes
    GROUP: tl.constexpr,  # columns of 16 bytes
    THREADS: tl.constexpr,  # of a program
    LOADS: tl.constexpr,  # groups of a thread
    BLOCKS: tl.constexpr,  # blocks of a row
):
    # Which row, and which block of it?
    row = tl.program_id(0) // BLOCKS
    number = tl.program_id(0) % BLOCKS
    start, head, groups = _groups_of(row, N, GROUP)

    # Load the block.
    x_ptr += start
    dx_ptr += start
    w_here = None if w_ptr is None else w_ptr + head
    first = number * (THREADS * LOADS)
    block = _block(first, groups, THREADS, GROUP, LOADS)
    xs = _loss_load(x_ptr, block, "")

    # What is known of the row.
    t, live, _, w_t, sum_w = _target(target_ptr, w_ptr, row, ignore, N)
    m = tl.load(rows_ptr + 2 * M + row)
    s = tl.load(rows_ptr + 3 * M + row)
    g_ptr += row.to(tl.int64) * g_stride
    p, a, e = _factors(g_ptr, live, w_t, sum_w, m, s, N, SMOOTH, Z)

    hot = (t - head).to(tl.int32)
    _write(xs, block, dx_ptr, w_here, hot, m, p, a, e, SMOOTH)
    edges = number == 0 if N % GROUP > 0 else False
    if edges:
        outer = _edges(head, groups, N, THREADS, GROUP)
        xs_outer = _loss_load(x_ptr, outer, "")
        _write(xs_outer, outer, dx_ptr, w_here, hot, m, p, a, e, SMOOTH)


def stride_of(g):
    """From one gradient to the next; 0 if there is a single one."""
    if g.dim() == 0:
        return 0
    return g.stride(0)


def loss_backward(x, target, w, rows, g, dx=None, ignore=-100, smooth=0.0, z=0.0):
    """The gradient of the logits, in dx or in a new matrix.

    rows comes from forward, and g has the gradients of the losses.
    """
    if dx is None:
        dx = torch.empty_like(x)
    M, N = x.shape
    group = 16 // x.itemsize
    warps = 4
    loads = 2
    threads = threads_of(warps)
    blocks = triton.cdiv(max(N // group, 1), threads * loads)
    _cross_entropy_bwd[(M * blocks,)](
        x_ptr=x,
        target_ptr=target,
        w_ptr=w,
        rows_ptr=rows,
        g_ptr=g,
        g_stride=stride_of(g),
        dx_ptr=dx,
        M=M,
        ignore=ignore,
        SMOOTH=smooth,
        Z=z,
        N=N,
        GROUP=group,
        THREADS=threads,
        LOADS=loads,
        BLOCKS=blocks,
        num_warps=warps,
    )
    return dx


class Later(torch.autograd.Function):
    """The gradient is computed in the backward pass."""

    @staticmethod
    def forward(ctx, x, target, w, reduction, options):
        rows = loss_forward(x, target, w, **options)
        ctx.save_for_backward(x, target, w, rows)
        ctx.options = options
        ctx.mean = reduction == "mean"
        if reduction == "none":
            return rows[0].to(x.dtype)
        loss, ctx.count = rows[:2].sum(dim=1)
        if ctx.mean:
            loss = loss / ctx.count
        return loss.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, g):
        x, target, w, rows = ctx.saved_tensors
        if ctx.mean:
            g = g / ctx.count
        dx = loss_backward(x, target, w, rows, g, **ctx.options)
        # One gradient for each argument of forward.
        return dx, None, None, None, None


EMPTY = tl.constexpr(0x7F800001_7F800001)  # two NaN that no sum gives


@triton.jit
def _share(
    words_ptr,  # (SLICES,): of this row
    part,  # our slice
    a,  # float32: the lower half of our word
    b,  # float32: the upper half
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    WAIT: tl.constexpr,  # False: in the interpreter
):
    """Store our word; return both numbers of each slice as soon as all are
    there."""
    # A number of 32 bits becomes one of 64 with zeros before it, because it is
    # unsigned.
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(words_ptr + part, low | (high << 32), sem="relaxed")

    slices = tl.arange(0, PADDED)
    at = words_ptr + tl.minimum(slices, SLICES - 1)
    word = tl.load(at, volatile=True)
    loads = 0
    while WAIT and tl.max((word == EMPTY).to(tl.int32)) > 0:
        word = tl.load(at, volatile=True)
        loads += 1
        if loads == 10_000_000:  # it never comes: end with an error
            tl.inline_asm_elementwise(
                "trap; mov.b32 $0, $1;",
                constraints="=r,r",
                args=[loads],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    a = word.to(tl.uint32).to(tl.float32, bitcast=True)
    b = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    # Behind the last slice there is a pair of nothing.
    return tl.where(slices < SLICES, a, LOWEST), tl.where(
        slices < SLICES, b, 0
    )


@triton.jit
def _cross_entropy_ahead(
    x_ptr,  # (M, N): logits, contiguous
    target_ptr,  # (M,): classes
    w_ptr,  # (N + 1,): weights in float32 and their sum; None: all are 1
    rows_ptr,  # (4, M): loss, weight, maximum and sum of each row
    g_ptr,  # the gradients of the losses
    g_stride,  # from one to the next; 0 if all rows have the same
    dx_ptr,  # (M, N); may be x. None: no second sweep
    words_ptr,  # a counter and (M, 2, SLICES) words; None: a single slice
    M,  # rows
    ignore,  # the target that does not count
    SMOOTH: tl.constexpr,  # label smoothing
    Z: tl.constexpr,  # the factor of the z-loss
    N: tl.constexpr,  # classes
    GROUP: tl.constexpr,  # columns of 16 bytes
    THREADS: tl.constexpr,  # of a program
    LOADS: tl.constexpr,  # groups that a thread loads at a time
    FULL: tl.constexpr,  # so many groups of each slice need no mask
    SLICES: tl.constexpr,  # of a row
    WIDTH: tl.constexpr,  # groups of a slice; the last one may have fewer
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    WAIT: tl.constexpr,  # False: in the interpreter
):
    STEP: tl.constexpr = THREADS * LOADS

    # Which row, and which slice of it?
    ticket = tl.program_id(0)
    if WAIT and words_ptr is not None:
        drawn = tl.atomic_add(words_ptr, 1, sem="relaxed") - EMPTY
        ticket = drawn.to(tl.int32)
    row = ticket // SLICES
    part = ticket % SLICES

    # Our groups. Slice 0 has the edges, too.
    start, head, groups_of_row = _groups_of(row, N, GROUP)
    skipped = part * WIDTH
    groups = tl.minimum(groups_of_row - skipped, WIDTH)
    edges = part == 0 if N % GROUP > 0 else False

    t, live, exists, w_t, sum_w = _target(target_ptr, w_ptr, row, ignore, N)

    # From here on, columns are counted from the first group of the slice.
    x_ptr += start + skipped * GROUP
    w_ptr = None if w_ptr is None else w_ptr + head + skipped * GROUP
    hot = (t - head - skipped * GROUP).to(tl.int32)

    # The program with the target stores what is kept of the row. It loads the
    # logit now. As soon as all programs have met, dx may be written over x.
    column = t - head
    at_edge = (column < 0) | (column >= groups_of_row * GROUP) | (exists == 0)
    inside = (hot >= 0) & (hot < groups * GROUP)
    mine = tl.where(at_edge, part == 0, inside)
    x_t = tl.load(x_ptr + hot, mask=exists & mine, other=0).to(tl.float32)

    # The first sweep, over our slice. It will be read again.
    place = (head, groups, edges, groups_of_row)
    m, s, sum_x = _sums(
        x_ptr,
        w_ptr,
        place,
        N,
        SMOOTH,
        THREADS,
        GROUP,
        LOADS,
        FULL,
        "evict_last",
    )

    # What all slices of the row have found.
    if words_ptr is not None:
        words = words_ptr + 1 + row.to(tl.int64) * (2 * SLICES)
        ms, exps = _share(words, part, m, s, SLICES, PADDED, WAIT)
        if SMOOTH > 0:
            words += SLICES
            _, parts = _share(words, part, m, sum_x, SLICES, PADDED, WAIT)
            sum_x = tl.sum(parts)
        m, s = tl.reduce((ms, exps), 0, _merge)
    sums = (m, s, sum_x)
    m, s = _keep(
        rows_ptr + row, M, mine, live, x_t, w_t, sum_w, sums, N, SMOOTH, Z
    )

    # The second sweep, the other way.
    if dx_ptr is not None:
        dx_ptr += start + skipped * GROUP
        g_ptr += row.to(tl.int64) * g_stride
        p, a, e = _factors(g_ptr, live, w_t, sum_w, m, s, N, SMOOTH, Z)
        for first in tl.range(0, tl.minimum(groups, FULL), STEP, num_stages=1):
            block = _block(first, None, THREADS, GROUP, LOADS)
            xs = _loss_load(x_ptr, block, "evict_first")  # for the last time
            _write(xs, block, dx_ptr, w_ptr, hot, m, p, a, e, SMOOTH)
        for first in tl.range(FULL, groups, STEP, num_stages=1):
            block = _block(first, groups, THREADS, GROUP, LOADS)
            xs = _loss_load(x_ptr, block, "evict_first")
            _write(xs, block, dx_ptr, w_ptr, hot, m, p, a, e, SMOOTH)
        if edges:
            outer = _edges(head, groups_of_row, N, THREADS, GROUP)
            xs_outer = _loss_load(x_ptr, outer, "evict_first")
            _write(xs_outer, outer, dx_ptr, w_ptr, hot, m, p, a, e, SMOOTH)
LOSS_NUM_SMS = GPU.multi_processor_count if ON_GPU else 4

# Bytes of a row that a single program has, and of a slice. The interpreter
# gets small ones. On AMD's GPUs programs do not wait for each other.
WHOLE_ROW = 128 * 1024
SLICE = 48 * 1024
if not ON_GPU:
    WHOLE_ROW = 768
    SLICE = 288
elif not CUDA:
    WHOLE_ROW = 2**31


def plan_ahead(row_bytes):
    """Warps of a program, groups that a thread loads at a time, slices of a
    row, and registers of a thread."""
    if row_bytes > WHOLE_ROW:
        return 8, 2, triton.cdiv(row_bytes, SLICE), 64
    if row_bytes > 65536:
        return 16, 4, 1, 64
    return 16, 2, 1, 64


def resident(warps, registers):
    """How many such programs the GPU runs at a time, at least."""
    return 65536 // (32 * warps * registers) * LOSS_NUM_SMS


def ahead(x, target, w, g, dx=None, ignore=-100, smooth=0.0, z=0.0):
    """What forward and backward return, from one kernel.

    g has the gradients of the losses. dx may be x, which is then overwritten.
    """
    if dx is None:
        dx = torch.empty_like(x)
    M, N = x.shape
    warps, loads, slices, registers = plan_ahead(N * x.itemsize)
    if slices > resident(warps, registers):
        options = {"ignore": ignore, "smooth": smooth, "z": z}
        rows = loss_forward(x, target, w, **options)
        return rows, loss_backward(x, target, w, rows, g, dx, **options)

    group = 16 // x.itemsize
    threads = threads_of(warps)
    slices, width, full = cut(N, group, slices, threads * loads)
    rows = torch.empty(4, M, device=x.device)
    words = None
    if slices > 1:
        empty = EMPTY.value if CUDA else 0x3F800000 << 32  # a sum of 1
        words = torch.full((1 + 2 * M * slices,), empty, device=x.device)
    options = {"num_warps": warps}
    if CUDA:
        options["maxnreg"] = registers

    # The interpreter runs one program after the other, and nobody can wait
    # there. So a launch without the second sweep stores all words first.
    gradients = [dx]
    if slices > 1 and not ON_GPU:
        gradients = [None, dx]
    for gradient in gradients:
        _cross_entropy_ahead[(M * slices,)](
            x_ptr=x,
            target_ptr=target,
            w_ptr=w,
            rows_ptr=rows,
            g_ptr=g,
            g_stride=stride_of(g),
            dx_ptr=gradient,
            words_ptr=words,
            M=M,
            ignore=ignore,
            SMOOTH=smooth,
            Z=z,
            N=N,
            GROUP=group,
            THREADS=threads,
            LOADS=loads,
            FULL=full,
            SLICES=slices,
            WIDTH=width,
            PADDED=triton.next_power_of_2(slices),
            WAIT=CUDA,
            **options,
        )
    return rows, dx


@triton.jit
def _scale(
    dx_ptr,  # (size,)
    factor_ptr,  # a single number
    size,
    BLOCK_SIZE: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1:
        blocks = tl.cdiv(size, BLOCK_SIZE)
        for i in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(i, tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            dx = tl.load(dx_ptr + at, mask=at < size)
            tl.store(dx_ptr + at, dx * factor, mask=at < size)


class Ahead(torch.autograd.Function):
    """The gradient is computed together with the loss."""

    @staticmethod
    def forward(ctx, x, target, w, reduction, options):
        # The loss divides by the weights of all targets that count.
        g = torch.ones((), device=x.device)
        if reduction == "mean":
            known = (target >= 0) & (target < x.shape[1])
            weights = known.float()
            if w is not None:
                weights = w[target.where(known, 0)]
            g = 1 / ((target != options["ignore"]) * weights).sum()
        rows, ctx.dx = ahead(x, target, w, g, **options)
        loss, count = rows[:2].sum(dim=1)
        if reduction == "mean":
            loss = loss / count
        return loss.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, factor):
        dx = ctx.dx
        ctx.dx = None
        if dx is None:
            raise RuntimeError("ahead=True: one backward pass, no second")
        _scale[(1024,)](
            dx_ptr=dx, factor_ptr=factor, size=dx.numel(), BLOCK_SIZE=2048
        )
        return dx, None, None, None, None


def loss_check_arguments(
    x, target, weight, ignore_index, reduction, label_smoothing
):
    """Raise an error that names the wrong argument, and says why."""
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    if x.dtype not in kinds:
        raise TypeError(f"input is {x.dtype}: it must be one of {kinds}")
    if target.dtype != torch.int64:
        raise TypeError(f"target is {target.dtype}: it must be torch.int64")

    tensors = {"input": x, "target": target}
    if weight is not None:
        tensors["weight"] = weight
        if not weight.is_floating_point():
            raise TypeError(f"weight is {weight.dtype}: it must have floats")
    for name, tensor in tensors.items():
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: input, target and weight must "
                f"all be on {DEVICE}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"input is on {x.device}: not the current one")

    N = x.shape[-1] if x.dim() > 0 else 0
    if N == 0 or target.shape != x.shape[:-1]:
        raise ValueError(
            f"input has the rows and classes {tuple(x.shape)}, and the shape "
            f"of target is {tuple(target.shape)}"
        )
    constant = weight is None or not weight.requires_grad
    if weight is not None and (weight.shape != (N,) or not constant):
        raise ValueError(
            f"weight has the shape {tuple(weight.shape)}: it must be a "
            f"constant weight for each of {N} classes"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction=}: it must be mean, sum or none")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{label_smoothing=}: it must be 0 to 1")
    if not ON_GPU:
        wrong = (target != ignore_index) & ((target < 0) | (target >= N))
        for at in wrong.nonzero()[:1].tolist():
            raise IndexError(f"target{at} is {target[*at]}, not 0 to {N - 1}")


def cross_entropy(
    input,
    target,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    ahead=False,
):
    """PyTorch's cross-entropy of classes, with a z-loss.

    ahead=True computes the gradient together with the loss, for one backward
    pass. It changes nothing for reduction="none".
    """
    x = input
    if x.dim() > 1:
        x = x.movedim(1, -1)  # PyTorch has the classes in dimension 1
    loss_check_arguments(
        x, target, weight, ignore_index, reduction, label_smoothing
    )
    w = None
    if weight is not None:
        w = weight.float()
        w = torch.cat((w, w.sum()[None]))
    options = {
        "ignore": ignore_index,
        "smooth": float(label_smoothing),
        "z": float(z_loss),
    }
    function = Later
    if ahead and reduction != "none" and x.requires_grad:
        function = Ahead
    loss = function.apply(
        x.reshape(-1, x.shape[-1]).contiguous(),
        target.flatten().contiguous(),
        w,
        reduction,
        options,
    )
    if reduction == "none":
        loss = loss.reshape(target.shape)
    return loss


# matrix-products/03-linear-cross-entropy --------------------------------------
# Gives linear_cross_entropy.
HEAD_NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


HEAD_SHARED = shared_memory()


HEAD_LOG2E = tl.constexpr(1.4426950408889634)  # the logarithm of e, to the base 2


@triton.jit
def _logits(
    sums,  # a tile of products, in float32
    bias_ptr,  # (classes,), or None
    name,  # the classes of its columns
    classes,
):
    """The logits of a tile. What is no class gets minus infinity, whose power
    is 0."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + name, mask=name < classes, other=0)
        sums += bias.to(tl.float32)[None, :]
    return tl.where(name[None, :] < classes, sums, float("-inf"))


@triton.jit
def _weights(
    weight_ptr,  # (classes,), or None: all weights are 1
    name,
    classes,
):
    """The weights of the columns; what is no class has 0."""
    exists = name < classes
    if weight_ptr is None:
        return tl.where(exists, 1.0, 0.0)
    else:
        weight = tl.load(weight_ptr + name, mask=exists, other=0)
        return weight.to(tl.float32)


@triton.jit
def _halves(sums):
    """The left and the right half of a tile."""
    both = sums.reshape(sums.shape[0], 2, sums.shape[1] // 2)
    return both.permute(0, 2, 1).split()


@triton.jit
def _scores(
    x_desc,  # (tokens, features) in tiles of TILE_M and TILE_K
    w_desc,  # (classes, features) in tiles of TILE_N and TILE_K
    powers_desc,  # (tokens, classes) in halves of a tile; or None
    parts_ptr,  # (2 or 3, columns of tiles, tokens)
    bias_ptr,  # (classes,), or None
    weight_ptr,  # (classes,), or None: all weights are 1
    tokens,
    classes,
    features,
    SMOOTH: tl.constexpr,  # whether there is label smoothing
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles in a group
    STAGES: tl.constexpr,  # num_stages of the inner loop
    STAY: tl.constexpr,  # whether programs take several tiles
    PRECISION: tl.constexpr,  # of float32: "tf32" or "ieee"
):
    # Without this promise the compiler would also write code for no features.
    tl.assume(features > 0)
    rows = tl.cdiv(tokens, TILE_M)
    columns = tl.cdiv(classes, TILE_N)
    width: tl.constexpr = TILE_N // 2
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=STAY
    ):
        row, column = _place(work, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N

        # The product, as for a linear layer. The weight has a row for each
        # class, so its tile is turned.
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(0, features, TILE_K, num_stages=STAGES):
            x = x_desc.load([row, k])
            w = w_desc.load([column, k])
            sums = tl.dot(x, w.T, sums, input_precision=PRECISION)

        # New: what is kept of the tile. We take half of it at a time, so that
        # half the shared memory is enough to store powers.
        halves = _halves(sums)

        # The largest logit of each token.
        maximum = tl.full((TILE_M,), LOWEST, tl.float32)
        for i in tl.static_range(2):
            name = column + i * width + tl.arange(0, width)
            logit = _logits(halves[i], bias_ptr, name, classes)
            maximum = tl.maximum(maximum, tl.max(logit, axis=1))

        # The sum of all powers, none of which is above 1.
        total = tl.zeros((TILE_M,), tl.float32)
        weighted = tl.zeros((TILE_M,), tl.float32)
        for i in tl.static_range(2):
            name = column + i * width + tl.arange(0, width)
            logit = _logits(halves[i], bias_ptr, name, classes)
            power = tl.exp2((logit - maximum[:, None]) * HEAD_LOG2E)
            total += tl.sum(power, axis=1)
            if powers_desc is not None:
                power = power.to(powers_desc.dtype)
                powers_desc.store([row, column + i * width], power)
            if SMOOTH:
                # Minus infinity times a weight of 0 would not be a number.
                weight = _weights(weight_ptr, name, classes)
                logit = tl.where(name[None, :] < classes, logit, 0)
                weighted += tl.sum(logit * weight[None, :], axis=1)

        # Tokens lie side by side, so that neighboring threads store neighbors.
        token = row + tl.arange(0, TILE_M)
        mask = token < tokens
        at = parts_ptr + (column // TILE_N).to(tl.int64) * tokens + token
        step = tl.cast(columns, tl.int64) * tokens
        tl.store(at, maximum, mask=mask)
        tl.store(at + step, total, mask=mask)
        if SMOOTH:
            tl.store(at + 2 * step, weighted, mask=mask)


@triton.jit
def _finish(
    parts_ptr,  # (2 or 3, columns, tokens), of _scores
    x_ptr,  # (tokens, features)
    w_ptr,  # (classes, features)
    bias_ptr,  # (classes,), or None
    weight_ptr,  # (classes,), or None: all weights are 1
    all_weights_ptr,  # their sum, if there are weights
    target_ptr,  # (tokens,)
    rows_ptr,  # (6, batch): loss, weight, lse, p, a, e of our tokens
    tokens,
    classes,
    features,
    columns,  # of tiles
    x_step,  # from a row of x to the next
    w_step,
    batch,
    ignore,  # the target that does not count
    smooth,  # label smoothing
    SMOOTH: tl.constexpr,  # whether there is any
    ROWS: tl.constexpr,  # tokens of a program
    PARTS: tl.constexpr,  # parts of a step
    FEATURES: tl.constexpr,  # features of a step
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    wide = tl.cast(tokens, tl.int64)  # parts may be more than 2**31

    # Put the parts together: logsumexp of each token.
    m = tl.full((ROWS,), LOWEST, tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    for start in range(0, columns, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < columns)[:, None] & inside[None, :]
        at = parts_ptr + part[:, None] * wide + token[None, :]
        part_m = tl.load(at, mask=mask, other=LOWEST)
        at += columns * wide
        part_s = tl.load(at, mask=mask, other=0)
        new = tl.maximum(m, tl.max(part_m, axis=0))
        power = tl.exp2((part_m - new[None, :]) * HEAD_LOG2E)
        # What was summed so far is relative to an older maximum.
        s = s * tl.exp2((m - new) * HEAD_LOG2E) + tl.sum(part_s * power, axis=0)
        m = new
        if SMOOTH:
            at += columns * wide
            weighted += tl.sum(tl.load(at, mask=mask, other=0), axis=0)
    # A token that does not exist has no parts.
    m = tl.where(inside, m, 0)
    log = tl.log(tl.where(inside, s, 1))

    # The logit of the target: one row of x times one row of w.
    target = tl.load(target_ptr + token, mask=inside, other=ignore)
    # Does the token count at all, and is its target a class?
    live = target != ignore
    exists = live & (target >= 0) & (target < classes)
    row = tl.where(exists, target, 0)
    dot = tl.zeros((ROWS,), tl.float32)
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_step
    w_at = w_ptr + row[:, None] * w_step
    for start in range(0, features, FEATURES):
        k = start + tl.arange(0, FEATURES)
        mask = (k < features)[None, :] & exists[:, None]
        x = tl.load(x_at + k[None, :], mask=mask, other=0).to(tl.float32)
        w = tl.load(w_at + k[None, :], mask=mask, other=0).to(tl.float32)
        dot += tl.sum(x * w, axis=1)
    if bias_ptr is not None:
        dot += tl.load(bias_ptr + row, mask=exists, other=0).to(tl.float32)

    # The weight of the token. A target that is no class makes it NaN.
    w_t = tl.full((ROWS,), 1.0, tl.float32)
    all_weights = tl.cast(classes, tl.float32)
    if weight_ptr is not None:
        w_t = tl.load(weight_ptr + row, mask=exists, other=0).to(tl.float32)
        all_weights = tl.load(all_weights_ptr)
    w_t = tl.where(live, tl.where(exists, w_t, float("nan")), 0)

    # The three factors, and the loss.
    a = (1 - smooth) * w_t
    e = tl.where(live, smooth / classes, 0)
    p = a + e * all_weights
    loss = a * (m - dot + log)
    if SMOOTH:
        loss += e * (all_weights * (m + log) - weighted)
    loss = tl.where(live, loss, 0)
    # Of a token that is ignored, all powers are to be 0.
    lse = tl.where(live, m + log, float("inf"))

    rows_ptr += token
    step = tl.cast(batch, tl.int64)
    tl.store(rows_ptr, loss, mask=inside)
    tl.store(rows_ptr + step, w_t, mask=inside)
    tl.store(rows_ptr + 2 * step, lse, mask=inside)
    tl.store(rows_ptr + 3 * step, p, mask=inside)
    tl.store(rows_ptr + 4 * step, a, mask=inside)
    tl.store(rows_ptr + 5 * step, e, mask=inside)


@dataclasses.dataclass(frozen=True)
class Options:
    ignore: int = -100  # the target that does not count
    reduction: str = "mean"
    smooth: float = 0.0  # label smoothing
    recompute: bool = False  # whether dw computes the logits again
    skip_below: float = 0.0  # gradients that are left out, in whole blocks
    chunk: int = 0  # tokens of a chunk; 0: as many as the rule says


HEAD_TILES = {
    # precision: rows, columns, numbers of a step, warps
    "16 bits": (128, 256, 64, 8),
    "tf32": (128, 128, 32, 8),
    "ieee": (64, 64, 16, 4),
    "before H100": (64, 64, 32, 4),
}


def head_plan(dtype, room, blocks=False):
    """Tiles of a product: ``room`` is how many bytes of shared memory each
    number of half a tile needs behind the loop."""
    precision = "16 bits"
    if dtype == torch.float32:
        precision = "ieee"
        # PyTorch's switch: whether Tensor Cores may cut float32.
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            precision = "tf32"
    tiles = precision
    if precision != "ieee" and HEAD_SHARED < 200_000:
        tiles = "before H100"
    tile_m, tile_n, tile_k, warps = HEAD_TILES[tiles]
    stage = (tile_m + tile_n) * tile_k * dtype.itemsize
    left = HEAD_SHARED - 1024 - tile_m * tile_n // 2 * room
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 16,
        "STAGES": max(1, min(4, left // stage)),
        "STAY": not blocks,
        "PRECISION": "tf32" if precision == "tf32" else "ieee",
        "num_warps": warps,
    }


def head_descriptor(t, rows, columns):
    return TensorDescriptor.from_tensor(t, [rows, columns])


def programs_of(M, N, tiles):
    count = triton.cdiv(M, tiles["TILE_M"]) * triton.cdiv(N, tiles["TILE_N"])
    if tiles["STAY"]:
        count = min(count, HEAD_NUM_SMS)
    return (count,)


def plan_scores(x):
    return head_plan(x.dtype, x.itemsize)


def scores(x, w, bias, weight, options, powers, parts):
    """Parts of logsumexp, and the powers, if there is a matrix for them."""
    tokens, features = x.shape
    classes = w.shape[0]
    tiles = plan_scores(x)
    half = tiles["TILE_M"], tiles["TILE_N"] // 2
    _scores[programs_of(tokens, classes, tiles)](
        x_desc=head_descriptor(x, tiles["TILE_M"], tiles["TILE_K"]),
        w_desc=head_descriptor(w, tiles["TILE_N"], tiles["TILE_K"]),
        powers_desc=None if powers is None else head_descriptor(powers, *half),
        parts_ptr=parts,
        bias_ptr=bias,
        weight_ptr=weight,
        tokens=tokens,
        classes=classes,
        features=features,
        SMOOTH=options.smooth > 0,
        **tiles,
    )


def finish(parts, x, w, bias, weight, all_weights, target, rows, options):
    """Put the parts together: six numbers of each token."""
    tokens, features = x.shape
    tile_n = plan_scores(x)["TILE_N"]
    _finish[(triton.cdiv(tokens, 16),)](
        parts_ptr=parts,
        x_ptr=x,
        w_ptr=w,
        bias_ptr=bias,
        weight_ptr=weight,
        all_weights_ptr=all_weights,
        target_ptr=target,
        rows_ptr=rows,
        tokens=tokens,
        classes=w.shape[0],
        features=features,
        columns=triton.cdiv(w.shape[0], tile_n),
        x_step=x.stride(0),
        w_step=w.stride(0),
        batch=rows.stride(0),
        ignore=options.ignore,
        smooth=options.smooth,
        SMOOTH=options.smooth > 0,
        ROWS=16,
        PARTS=64,
        FEATURES=256,
        num_warps=4,
    )


@triton.jit
def _gradient(
    power,  # a tile of powers
    p,  # of each token: the factor of its powers
    a,  # what is subtracted at the target
    e,  # what is subtracted everywhere, times the weight of a class
    target,
    name,  # the classes of the columns
    weight,  # the weights of the columns
    SMOOTH: tl.constexpr,
):
    """The gradient of a tile of logits."""
    grad = power * p[:, None]
    if SMOOTH:
        grad -= e[:, None] * weight[None, :]
    return grad - tl.where(name[None, :] == target[:, None], a[:, None], 0)


@triton.jit
def _in_place(
    grads_desc,  # (tokens, classes) in tiles of ROWS and WIDTH: powers
    parts_ptr,  # (2 or 3, columns, tokens), of _scores
    rows_ptr,  # (6, batch) from our first token on
    target_ptr,  # (tokens,)
    weight_ptr,  # (classes,), or None
    flags_ptr,  # (blocks of tokens, blocks of classes), or None
    tokens,
    classes,
    batch,
    flags_step,  # from a row of flags to the next
    skip_below,  # a block whose gradients are all below is not wanted
    SMOOTH: tl.constexpr,
    TILE_N: tl.constexpr,  # classes of a part
    BLOCK: tl.constexpr,  # tokens and classes of a flag
    ROWS: tl.constexpr,  # tokens of a program, those of a block
    WIDTH: tl.constexpr,  # classes of a program
):
    # Which tokens and which classes are ours, and what is known of them?
    across = tl.cdiv(classes, WIDTH)
    row = tl.program_id(0) // across * ROWS
    column = tl.program_id(0) % across * WIDTH
    token = row + tl.arange(0, ROWS)
    mask = token < tokens
    rows_ptr += token
    step = tl.cast(batch, tl.int64)
    lse = tl.load(rows_ptr + 2 * step, mask=mask, other=0)
    p = tl.load(rows_ptr + 3 * step, mask=mask, other=0)
    a = tl.load(rows_ptr + 4 * step, mask=mask, other=0)
    e = tl.load(rows_ptr + 5 * step, mask=mask, other=0)
    target = tl.load(target_ptr + token, mask=mask, other=-1)

    # The powers are relative to the largest logit of their tile. With lse in
    # its place they become the softmax.
    part = (column // TILE_N).to(tl.int64) * tokens
    m = tl.load(parts_ptr + part + token, mask=mask, other=0)
    power = grads_desc.load([row, column]).to(tl.float32)
    power *= tl.exp2((m - lse) * HEAD_LOG2E)[:, None]

    name = column + tl.arange(0, WIDTH)
    weight = _weights(weight_ptr, name, classes)
    grad = _gradient(power, p, a, e, target, name, weight, SMOOTH)
    grads_desc.store([row, column], grad.to(grads_desc.dtype))

    if flags_ptr is not None:
        # What is not below is wanted, and so is NaN, which is not below
        # anything. The factor of a token that is ignored is 0.
        small = tl.abs(grad) < (skip_below * p)[:, None]
        large = tl.where(small | (p == 0)[:, None], 0, 1)
        blocks: tl.constexpr = WIDTH // BLOCK
        large = tl.max(large, axis=0).reshape(blocks, BLOCK)
        number = column // BLOCK + tl.arange(0, blocks)
        at = flags_ptr + (row // BLOCK).to(tl.int64) * flags_step + number
        exists = number < tl.cdiv(classes, BLOCK)
        tl.store(at, tl.max(large, axis=1).to(tl.int8), mask=exists)


@triton.jit
def _quarters(sums):
    """The four quarters of a tile, from left to right."""
    left, right = _halves(sums)
    first, second = _halves(left)
    third, fourth = _halves(right)
    return first, second, third, fourth


@triton.jit
def _multiply(
    grads_desc,  # gradients of logits, (tokens, classes)
    b_desc,  # (K, N) in tiles of TILE_K and TILE_N
    out_desc,  # (M, N) in quarters of a tile: the result, or float32 sums
    scale_ptr,  # a number by which the result is multiplied; or None
    list_ptr,  # (rows of tiles, blocks of K): which blocks; or None: all
    count_ptr,  # (rows of tiles,): how many of them
    M,
    N,
    K,
    list_step,  # from a row of the list to the next
    TRANSPOSED: tl.constexpr,  # for dw: M are classes, and K tokens
    ADD: tl.constexpr,  # whether the product is added to what is there
    BLOCK: tl.constexpr,  # of the list; a multiple of TILE_K
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    STAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tl.assume(K > 0)
    rows = tl.cdiv(M, TILE_M)
    columns = tl.cdiv(N, TILE_N)
    width: tl.constexpr = TILE_N // 4
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=STAY
    ):
        tile, column = _place(work, rows, columns, GROUP)
        row = tile * TILE_M
        column *= TILE_N
        end = K
        ours = list_ptr
        if list_ptr is not None:
            # Only the blocks of our list.
            end = tl.load(count_ptr + tile) * BLOCK
            ours += tl.cast(tile, tl.int64) * list_step

        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for step in tl.range(0, end, TILE_K, num_stages=STAGES):
            k = step
            if list_ptr is not None:
                block = tl.load(ours + step // BLOCK)
                k = block * BLOCK + step % BLOCK
            if TRANSPOSED:
                a = grads_desc.load([k, row]).T
            else:
                a = grads_desc.load([row, k])
            b = b_desc.load([k, column])
            sums = tl.dot(a, b, sums, input_precision=PRECISION)

        # Add what earlier chunks have left. Old and new sums both pass through
        # shared memory, so there is only room for a quarter of the tile.
        quarters = _quarters(sums)
        for i in tl.static_range(4):
            quarter = quarters[i]
            if ADD:
                quarter += out_desc.load([row, column + i * width])
            if scale_ptr is not None:
                quarter *= tl.load(scale_ptr)
            quarter = quarter.to(out_desc.dtype)
            out_desc.store([row, column + i * width], quarter)


@triton.jit
def _sum_columns(
    grads_desc,  # gradients of logits, (tokens, classes), in ROWS and WIDTH
    sums_ptr,  # (classes,), float32
    tokens,
    classes,
    FIRST: tl.constexpr,  # whether nothing has been summed before
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column = tl.program_id(0) * WIDTH
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for row in range(0, tokens, ROWS):
        sums += grads_desc.load([row, column]).to(tl.float32)
    total = tl.sum(sums, axis=0)
    name = column + tl.arange(0, WIDTH)
    mask = name < classes
    if not FIRST:
        total += tl.load(sums_ptr + name, mask=mask, other=0)
    tl.store(sums_ptr + name, total, mask=mask)


BLOCK = 64  # tokens and classes that are left out together


def in_place(grads, parts, x, rows, target, weight, flags, options):
    """Make gradients of the powers."""
    tokens, classes = grads.shape
    tile_n = plan_scores(x)["TILE_N"]
    width = min(2 * BLOCK, tile_n)  # of one part
    _in_place[(triton.cdiv(tokens, BLOCK) * triton.cdiv(classes, width),)](
        grads_desc=head_descriptor(grads, BLOCK, width),
        parts_ptr=parts,
        rows_ptr=rows,
        target_ptr=target,
        weight_ptr=weight,
        flags_ptr=flags,
        tokens=tokens,
        classes=classes,
        batch=rows.stride(0),
        flags_step=0 if flags is None else flags.stride(0),
        skip_below=options.skip_below,
        SMOOTH=options.smooth > 0,
        TILE_N=tile_n,
        BLOCK=BLOCK,
        ROWS=BLOCK,
        WIDTH=width,
        num_warps=8,
    )


def blocks_wanted(flags, dtype, transposed):
    """For each row of tiles the numbers of the blocks that its product needs,
    those first, and how many they are."""
    if flags is None:
        return None
    if transposed:
        flags = flags.T
    blocks = head_plan(dtype, 4, blocks=True)["TILE_M"] // BLOCK
    rows = triton.cdiv(flags.shape[0], blocks)
    flags = F.pad(flags, (0, 0, 0, rows * blocks - flags.shape[0]))
    wanted = flags.view(rows, blocks, -1).amax(dim=1)
    order = wanted.argsort(dim=1, descending=True, stable=True)
    return order.int(), wanted.sum(dim=1, dtype=torch.int32)


def multiply(grads, b, out, transposed, add=False, scale=None, lists=None):
    """out = grads @ b, or grads.T @ b; or that and what is in out, if ``add``
    says so. ``lists`` say which blocks are wanted."""
    K, M = grads.shape if transposed else grads.shape[::-1]
    N = b.shape[1]
    tiles = head_plan(grads.dtype, out.itemsize, blocks=lists is not None)
    tile_m, tile_n, tile_k = tiles["TILE_M"], tiles["TILE_N"], tiles["TILE_K"]
    grads_tile = (tile_k, tile_m) if transposed else (tile_m, tile_k)
    order, count = lists or (None, None)
    if lists is not None:
        # The number of a block is loaded two steps before its tiles are.
        tiles["STAGES"] += 2
    _multiply[programs_of(M, N, tiles)](
        grads_desc=head_descriptor(grads, *grads_tile),
        b_desc=head_descriptor(b, tile_k, tile_n),
        out_desc=head_descriptor(out, tile_m, tile_n // 4),
        scale_ptr=scale,
        list_ptr=order,
        count_ptr=count,
        M=M,
        N=N,
        K=K,
        list_step=0 if order is None else order.stride(0),
        TRANSPOSED=transposed,
        ADD=add,
        BLOCK=BLOCK,
        **tiles,
    )


def sum_columns(grads, sums, first):
    """Add the columns of the gradients to the sums."""
    tokens, classes = grads.shape
    _sum_columns[(triton.cdiv(classes, 64),)](
        grads_desc=head_descriptor(grads, 64, 64),
        sums_ptr=sums,
        tokens=tokens,
        classes=classes,
        FIRST=first,
        ROWS=64,
        WIDTH=64,
        num_warps=4,
    )


def one_round(features, dtype):
    """So many rows, in whole tiles, give work to all SMs in a product with so
    many columns."""
    tiles = head_plan(dtype, dtype.itemsize)
    columns = triton.cdiv(features, tiles["TILE_N"])
    return tiles["TILE_M"] * max(1, HEAD_NUM_SMS // columns)


LOGITS = 2**29  # at most so many in a chunk: 1.07 GB in 16 bits
FEW_LOGITS = 2**24  # the same with recompute=True: 34 MB


def length_of(count, across, features, dtype, logits):
    """How many of ``count`` tokens are a chunk, if each has ``across`` logits;
    or how many classes are a strip. All are about as long."""
    most = max(logits // across, one_round(features, dtype))
    length = triton.cdiv(count, triton.cdiv(count, most))
    step = 2 * BLOCK
    return triton.cdiv(length, step) * step


class Step:
    """What a forward pass has computed for the backward pass."""

    rows = None  # (6, tokens): see _finish
    dx = None  # (tokens, features), for g = 1
    db = None  # (classes,), float32, for g = 1
    sums = None  # (classes, features), float32: dw for g = 1
    grads = None  # if there is one chunk: the gradients of its logits
    lists = None  # which blocks of them dw needs; None: all


def head_forward(x, w, bias, weight, target, options, wants):
    """The numbers of each token, and what ``wants`` says of dx, dw, db."""
    wants_dx, wants_dw, wants_db = wants
    if options.recompute:
        # Both are left to the backward pass.
        wants_dw = False
        wants_db = False
    tokens, features = x.shape
    classes = w.shape[0]
    step = Step()
    step.rows = torch.empty(6, tokens, device=x.device)
    if tokens == 0:
        return step
    all_weights = None
    if weight is not None:
        all_weights = weight.sum(dtype=torch.float32)

    chunk = options.chunk
    if chunk == 0:
        logits = FEW_LOGITS if options.recompute else LOGITS
        chunk = length_of(tokens, classes, features, x.dtype, logits)
    chunk = min(chunk, tokens)
    one_chunk = chunk == tokens

    # What is computed, and what each chunk uses again.
    columns = triton.cdiv(classes, plan_scores(x)["TILE_N"])
    kinds = 3 if options.smooth > 0 else 2
    parts = torch.empty(kinds * columns * chunk, device=x.device)
    grads = None
    flags = None
    if wants_dx or wants_dw or wants_db:
        grads = padded(chunk, classes, x.dtype, x.device)
        if options.skip_below > 0:
            shape = triton.cdiv(chunk, BLOCK), triton.cdiv(classes, BLOCK)
            flags = torch.empty(shape, dtype=torch.int8, device=x.device)
    if wants_dx:
        step.dx = padded(tokens, features, x.dtype, x.device)
    if wants_dw and not one_chunk:
        step.sums = padded(classes, features, torch.float32, x.device)
    if wants_db:
        step.db = torch.empty(classes, device=x.device)

    for start in range(0, tokens, chunk):
        some = slice(start, min(start + chunk, tokens))
        x_some = x[some]
        target_some = target[some]
        rows_some = step.rows[:, some]
        if grads is not None:
            grads = grads[: len(x_some)]  # the last chunk may be shorter
        if flags is not None:
            flags = flags[: triton.cdiv(len(x_some), BLOCK)]
        scores(x_some, w, bias, weight, options, grads, parts)
        finish(
            parts, x_some, w, bias, weight, all_weights, target_some,
            rows_some, options,
        )  # fmt: skip
        if grads is None:
            continue
        in_place(
            grads, parts, x_some, rows_some, target_some, weight, flags,
            options,
        )  # fmt: skip
        if wants_dx:
            lists = blocks_wanted(flags, x.dtype, transposed=False)
            multiply(grads, w, step.dx[some], transposed=False, lists=lists)
        if wants_dw:
            lists = blocks_wanted(flags, x.dtype, transposed=True)
            if one_chunk:
                step.grads = grads
                step.lists = lists
            else:
                multiply(
                    grads,
                    x_some,
                    step.sums,
                    transposed=True,
                    add=start > 0,
                    lists=lists,
                )
        if wants_db:
            sum_columns(grads, step.db, first=start == 0)
    return step


@triton.jit
def _round(
    sums_desc,  # (classes, features), float32, in tiles of ROWS and WIDTH
    dw_desc,  # the result, in the same tiles
    scale_ptr,  # a number by which all sums are multiplied
    features,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    across = tl.cdiv(features, WIDTH)
    row = tl.program_id(0) // across * ROWS
    column = tl.program_id(0) % across * WIDTH
    sums = sums_desc.load([row, column])
    sums *= tl.load(scale_ptr)
    dw_desc.store([row, column], sums.to(dw_desc.dtype))


def finish_dw(step, x, w, scale):
    """dw in the type of x, from what the forward pass has left."""
    classes, features = w.shape
    dw = padded(classes, features, x.dtype, x.device)
    if step.sums is None:
        multiply(
            step.grads, x, dw, transposed=True, scale=scale, lists=step.lists
        )
        return dw
    _round[(triton.cdiv(classes, 64) * triton.cdiv(features, 64),)](
        sums_desc=head_descriptor(step.sums, 64, 64),
        dw_desc=head_descriptor(dw, 64, 64),
        scale_ptr=scale,
        features=features,
        ROWS=64,
        WIDTH=64,
        num_warps=4,
    )
    return dw


@triton.jit
def _scores_again(
    x_desc,  # (tokens, features) in tiles of TILE_M and TILE_K
    w_desc,  # (classes, features) in tiles of TILE_N and TILE_K
    grads_desc,  # New: (tokens, classes) in halves of a tile
    rows_ptr,  # New: (6, tokens), of _finish
    target_ptr,  # New: (tokens,)
    bias_ptr,
    weight_ptr,
    tokens,
    classes,  # of the strip
    features,
    first_class,  # New: the number of our first class
    SMOOTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    STAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tl.assume(features > 0)
    rows = tl.cdiv(tokens, TILE_M)
    columns = tl.cdiv(classes, TILE_N)
    width: tl.constexpr = TILE_N // 2
    step = tl.cast(tokens, tl.int64)
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=STAY
    ):
        row, column = _place(work, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N

        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(0, features, TILE_K, num_stages=STAGES):
            x = x_desc.load([row, k])
            w = w_desc.load([column, k])
            sums = tl.dot(x, w.T, sums, input_precision=PRECISION)

        # New: what is known of each token by now.
        token = row + tl.arange(0, TILE_M)
        mask = token < tokens
        at = rows_ptr + token
        lse = tl.load(at + 2 * step, mask=mask, other=0)
        p = tl.load(at + 3 * step, mask=mask, other=0)
        a = tl.load(at + 4 * step, mask=mask, other=0)
        e = tl.load(at + 5 * step, mask=mask, other=0)
        target = tl.load(target_ptr + token, mask=mask, other=-1) - first_class

        # New: a power is the softmax itself, for lse is about all classes.
        halves = _halves(sums)
        for i in tl.static_range(2):
            name = column + i * width + tl.arange(0, width)
            logit = _logits(halves[i], bias_ptr, name, classes)
            power = tl.exp2((logit - lse[:, None]) * HEAD_LOG2E)
            weight = _weights(weight_ptr, name, classes)
            grad = _gradient(power, p, a, e, target, name, weight, SMOOTH)
            grad = grad.to(grads_desc.dtype)
            grads_desc.store([row, column + i * width], grad)


def scores_again(x, w, bias, weight, options, grads, rows, target, first):
    """The gradients of the logits of some classes, now that lse is known."""
    tokens, features = x.shape
    classes = w.shape[0]
    tiles = plan_scores(x)
    _scores_again[programs_of(tokens, classes, tiles)](
        x_desc=head_descriptor(x, tiles["TILE_M"], tiles["TILE_K"]),
        w_desc=head_descriptor(w, tiles["TILE_N"], tiles["TILE_K"]),
        grads_desc=head_descriptor(grads, tiles["TILE_M"], tiles["TILE_N"] // 2),
        rows_ptr=rows,
        target_ptr=target,
        bias_ptr=bias,
        weight_ptr=weight,
        tokens=tokens,
        classes=classes,
        features=features,
        first_class=first,
        SMOOTH=options.smooth > 0,
        **tiles,
    )


def in_strips(x, w, bias, weight, target, rows, options, scale, wants):
    """dw and db, some classes after the other: their logits are computed
    again, and nothing has to be summed up over chunks."""
    tokens, features = x.shape
    classes = w.shape[0]
    dw = None
    db = None
    if wants[1]:
        dw = padded(classes, features, x.dtype, x.device)
    if wants[2]:
        db = torch.empty(classes, device=x.device)
    strip = length_of(classes, tokens, features, x.dtype, FEW_LOGITS)
    grads = padded(tokens, min(strip, classes), x.dtype, x.device)

    for start in range(0, classes, strip):
        some = slice(start, min(start + strip, classes))
        grads = grads[:, : some.stop - start]  # the last may be narrower
        scores_again(
            x,
            w[some],
            None if bias is None else bias[some],
            None if weight is None else weight[some],
            options,
            grads,
            rows,
            target,
            start,
        )
        if wants[1]:
            multiply(grads, x, dw[some], transposed=True, scale=scale)
        if wants[2]:
            sum_columns(grads, db[some], first=True)
    return dw, db


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, target, weight, options):
        wants = ctx.needs_input_grad[:3]
        if options.reduction == "none":
            # The factor of each token, which dw needs, is not known yet.
            options = dataclasses.replace(options, recompute=True)
        step = head_forward(x, w, bias, weight, target, options, wants)
        ctx.step = step
        ctx.options = options
        ctx.save_for_backward(x, w, bias, target, weight, step.rows)
        loss = step.rows[0]  # of each token
        weights = step.rows[1]
        if options.reduction == "none":
            # A copy, so that whoever changes it does not change our numbers.
            return loss.to(x.dtype, copy=True)
        loss = loss.sum()
        if options.reduction == "mean":
            loss = loss / weights.sum()
        return loss.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, g):
        x, w, bias, target, weight, rows = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        if len(x) == 0:
            given = zip((x, w, bias), wants, strict=True)
            grads = [
                torch.zeros_like(t) if want else None for t, want in given
            ]
            return *grads, None, None, None
        options = ctx.options
        step = ctx.step
        ctx.step = None
        if step is None:
            # This is not the first backward pass, and the first has taken
            # what the forward pass had computed.
            step = head_forward(x, w, bias, weight, target, options, wants)

        # By what is everything multiplied? Where all tokens are ignored, the
        # mean is 0 / 0, and PyTorch has gradients of 0.
        live = target != options.ignore
        scale = g.float()
        if options.reduction == "mean":
            scale = scale / rows[1].sum()
        factor = torch.where(live, scale, 0)  # of each token

        dx = None
        if wants[0]:
            dx = step.dx.mul_(factor[:, None])
            dx = dx.contiguous()
        if options.reduction == "none":
            # From here on each token has its factor in its gradients.
            rows = rows.clone()
            rows[3:] *= factor
            scale = None
        else:
            scale = torch.where(live.any(), scale, 0)
        dw = None
        db = None
        if options.recompute:
            if wants[1] or wants[2]:
                dw, db = in_strips(
                    x, w, bias, weight, target, rows, options, scale, wants
                )
        else:
            if wants[1]:
                dw = finish_dw(step, x, w, scale)
            db = step.db
        if wants[1]:
            dw = dw.contiguous()
        if wants[2]:
            if scale is not None:
                db = db * scale
            db = db.to(bias.dtype)
        return dx, dw, db, None, None, None


def head_for_descriptors(t):
    """The matrix, or a copy of it in a layout that a descriptor takes."""
    if lies_in_rows(t):
        return t
    return padded(*t.shape, dtype=t.dtype, device=t.device).copy_(t)


def head_check_arguments(
    input,
    linear_weight,
    target,
    linear_bias,
    weight,
    reduction,
    ignore_index,
    label_smoothing,
    recompute,
    skip_below,
):
    """Raise an error that names the wrong argument, and says why."""
    floats = {
        "input": input,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
    }
    floats = {name: t for name, t in floats.items() if t is not None}
    for name, t in floats.items():
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"{name} has {t.dtype}: float16, bfloat16 and float32 are "
                "taken"
            )
        if t.dtype != input.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and input has {input.dtype}: they "
                "must be the same"
            )
    if target.dtype != torch.int64:
        raise TypeError(
            f"target has {target.dtype}: classes are torch.int64, and "
            "probabilities are not taken"
        )
    if weight is not None and not weight.is_floating_point():
        raise TypeError(f"weight has {weight.dtype}: it must have floats")

    if input.dim() == 0:
        raise ValueError("input has no dimension: the last one has features")
    if linear_weight.dim() != 2:
        raise ValueError(
            f"linear_weight has {linear_weight.dim()} dimensions, not 2: "
            "classes and features"
        )
    if linear_weight.numel() == 0:
        raise ValueError(
            f"linear_weight is {tuple(linear_weight.shape)}: a class and a "
            "feature are needed"
        )
    classes, features = linear_weight.shape
    if input.shape[-1] != features:
        raise ValueError(
            f"input has {input.shape[-1]} features, and linear_weight takes "
            f"{features}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target is {tuple(target.shape)}, and input has the tokens "
            f"{tuple(input.shape[:-1])}"
        )
    for name, t in {"linear_bias": linear_bias, "weight": weight}.items():
        if t is not None and t.shape != (classes,):
            raise ValueError(
                f"{name} is {tuple(t.shape)}, and linear_weight has {classes} "
                "classes"
            )
    if weight is not None and weight.requires_grad:
        raise ValueError("weight wants a gradient: it must be a constant")

    for name, t in (floats | {"target": target, "weight": weight}).items():
        if t is None:
            continue
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"reduction is {reduction!r}: mean, sum and none are taken"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"label_smoothing is {label_smoothing}: it must be 0 to 1"
        )
    if not 0 <= skip_below < 1:
        raise ValueError(
            f"skip_below is {skip_below}: it must be 0 or more, and below 1"
        )
    if skip_below > 0 and (recompute or reduction == "none"):
        raise ValueError(
            f"skip_below is {skip_below}: it is not taken with recompute=True "
            "or reduction='none'"
        )
    if not ON_GPU:
        wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        for at in wrong.nonzero()[:1].tolist():
            raise IndexError(
                f"target{at} is {target[*at]}, not 0 to {classes - 1}"
            )


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    recompute=False,
    skip_below=0.0,
):
    """What F.linear_cross_entropy gives, for targets that are classes.

    input is (..., features), linear_weight is (classes, features), and target
    is (...). recompute=True computes the logits a second time for the gradient
    of linear_weight, which takes longer and needs less memory, and so does
    reduction="none". Otherwise, blocks of logits whose gradients are all below
    skip_below, as a share of the weight of their token, add nothing to the
    gradients.
    """
    head_check_arguments(
        input, linear_weight, target, linear_bias, weight, reduction,
        ignore_index, label_smoothing, recompute, skip_below,
    )  # fmt: skip
    dtype = input.dtype
    x = input.reshape(-1, input.shape[-1])
    w = linear_weight
    bias = linear_bias
    if not torch.is_grad_enabled():
        # needs_input_grad does not say that we run under torch.no_grad().
        x = x.detach()
        w = w.detach()
        bias = None if bias is None else bias.detach()
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        x, w = x.float(), w.float()
        bias = None if bias is None else bias.float()
    options = Options(
        ignore=ignore_index,
        reduction=reduction,
        smooth=float(label_smoothing),
        recompute=recompute,
        skip_below=float(skip_below),
    )
    loss = _LinearCrossEntropy.apply(
        head_for_descriptors(x),
        head_for_descriptors(w),
        None if bias is None else bias.contiguous(),
        target.reshape(-1).contiguous(),
        None if weight is None else weight.contiguous(),
        options,
    ).to(dtype)
    if reduction == "none":
        loss = loss.reshape(target.shape)
    return loss
