"""Forward attention in Gluon: products that run while powers are taken.

Trials: rows of D contiguous numbers, lengths that are multiples of the tiles.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)


@gluon.jit
def _pinned(total):
    """The same numbers, never negative, but taken before what follows.

    Without it ptxas waits for a product in flight before it takes the powers,
    as nothing forbids that. The store is never done.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 a;
        mov.b32 a, 0;
        setp.lt.f32 p, $1, 0f00000000;
        @p st.volatile.shared.b32 [a], $1;
        mov.b32 $0, $1;
        }""", "=r,r", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _powers(maximum, total, score, start, query, scale, TILE_K: gl.constexpr, MASK: gl.constexpr, QK: gl.constexpr):
    if MASK:
        key = start + gl.arange(0, TILE_K, gl.SliceLayout(0, QK))
        score = gl.where(key[None, :] <= query[:, None], score, float("-inf"))
    new = gl.maximum(maximum, gl.max(score, axis=1) * scale)
    power = gl.exp2(score * scale - new[:, None])
    shrink = gl.exp2(maximum - new)
    total = total * shrink + gl.sum(power, axis=1)
    return new, total, shrink, power


@gluon.jit
def _step(maximum, total, weighted, power, i, q, k_mem, v_mem, k_full, v_full, k_free, v_free, turn, half, query, scale,
          DTYPE: gl.constexpr, ROWS: gl.constexpr, TILE_K: gl.constexpr, BUFFERS: gl.constexpr, MASK: gl.constexpr,
          QK: gl.constexpr, PV: gl.constexpr, P: gl.constexpr, PING: gl.constexpr, PIN: gl.constexpr):
    """Scores of tile i, and the product of tile i - 1 beside its powers."""
    at = i % BUFFERS
    before = (i - 1) % BUFFERS
    mbarrier.wait(k_full.index(at), (i // BUFFERS) & 1)
    if PING:
        # Each of both groups issues its products when the other one has.
        mbarrier.wait(turn.index(half), (i - 1) & 1)
    score = warpgroup_mma(q, k_mem.index(at).permute((1, 0)), gl.zeros([ROWS, TILE_K], gl.float32, QK),
                          use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((i - 1) // BUFFERS) & 1)
    weighted = warpgroup_mma(power, v_mem.index(before), weighted, is_async=True)
    if PING:
        mbarrier.arrive(turn.index(1 - half), count=1)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(k_free.index(at), count=1)
    maximum, total, shrink, new = _powers(maximum, total, score, i * TILE_K, query, scale, TILE_K, MASK, QK)
    if PIN:
        total = _pinned(total)
    weighted, power = warpgroup_mma_wait(0, deps=[weighted, power])
    mbarrier.arrive(v_free.index(before), count=1)
    weighted = weighted * gl.convert_layout(shrink, gl.SliceLayout(1, PV))[:, None]
    return maximum, total, weighted, gl.convert_layout(new.to(DTYPE), P)


@gluon.jit
def _attend(half, q_desc, y_desc, lse_ptr, q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free, turn,
            first, row, scale, steps, whole,
            CAUSAL: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, TILE_K: gl.constexpr,
            BUFFERS: gl.constexpr, WARPS: gl.constexpr, PING: gl.constexpr, PIN: gl.constexpr):
    """ROWS queries: their results."""
    DTYPE: gl.constexpr = q_desc.dtype
    QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE_K, 16])
    PV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, PV, 2)
    query = first + half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, QK))
    q = q_mem.index(half)
    mbarrier.wait(q_full, 0)
    maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, QK))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, QK))
    weighted = gl.zeros([ROWS, DIM], gl.float32, PV)
    mbarrier.wait(k_full.index(0), 0)
    score = warpgroup_mma(q, k_mem.index(0).permute((1, 0)), gl.zeros([ROWS, TILE_K], gl.float32, QK),
                          use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(k_free.index(0), count=1)
    maximum, total, _, power = _powers(maximum, total, score, 0, query, scale, TILE_K, CAUSAL, QK)
    power = gl.convert_layout(power.to(DTYPE), P)
    for i in range(1, whole):
        maximum, total, weighted, power = _step(
            maximum, total, weighted, power, i, q, k_mem, v_mem, k_full, v_full, k_free, v_free, turn, half, query,
            scale, DTYPE, ROWS, TILE_K, BUFFERS, False, QK, PV, P, PING, PIN)
    if CAUSAL:
        for i in range(gl.maximum(whole, 1), steps):
            maximum, total, weighted, power = _step(
                maximum, total, weighted, power, i, q, k_mem, v_mem, k_full, v_full, k_free, v_free, turn, half, query,
                scale, DTYPE, ROWS, TILE_K, BUFFERS, True, QK, PV, P, PING, PIN)
    last = (steps - 1) % BUFFERS
    mbarrier.wait(v_full.index(last), ((steps - 1) // BUFFERS) & 1)
    weighted = warpgroup_mma(power, v_mem.index(last), weighted, is_async=True)
    weighted, power = warpgroup_mma_wait(0, deps=[weighted, power])
    y = weighted / gl.convert_layout(total, gl.SliceLayout(1, PV))[:, None]
    q.store(y.to(DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row + first + half * ROWS, 0], q)
    gl.store(lse_ptr + row + query, maximum + gl.log2(total))
    tma.store_wait(0)


@gluon.jit
def _load(q_desc, k_desc, v_desc, q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free, first, row, k_row, steps,
          ROWS: gl.constexpr, HALVES: gl.constexpr, TILE_K: gl.constexpr, BUFFERS: gl.constexpr):
    """One warp fetches everything."""
    BYTES: gl.constexpr = HALVES * ROWS * q_desc.block_type.shape[1] * 2  # of 16 bits
    mbarrier.expect(q_full, BYTES)
    for half in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(q_desc, [row + first + half * ROWS, 0], q_full, q_mem.index(half))
    for i in range(steps):
        at = i % BUFFERS
        phase = (i // BUFFERS) & 1 ^ 1
        mbarrier.wait(k_free.index(at), phase)
        mbarrier.expect(k_full.index(at), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [k_row + i * TILE_K, 0], k_full.index(at), k_mem.index(at))
        mbarrier.wait(v_free.index(at), phase)
        mbarrier.expect(v_full.index(at), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [k_row + i * TILE_K, 0], v_full.index(at), v_mem.index(at))


@gluon.jit(do_not_specialize=["heads", "queries", "keys"])
def fwd_gluon(q_desc, k_desc, v_desc, y_desc, lse_ptr, heads, queries, keys, scale,
              GROUP: gl.constexpr, CAUSAL: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
              TILE_K: gl.constexpr, BUFFERS: gl.constexpr, PING: gl.constexpr, REGISTERS: gl.constexpr,
              ORDER: gl.constexpr, PIN: gl.constexpr, num_warps: gl.constexpr):
    """HALVES groups of warps with ROWS queries each, and one warp that loads."""
    OWN: gl.constexpr = ROWS * HALVES
    tiles = queries // OWN
    if ORDER == 0:
        tile = gl.program_id(0) % tiles
        lead = gl.program_id(0) // tiles
    else:
        leads = gl.num_programs(0) // tiles
        tile = gl.program_id(0) // leads
        lead = gl.program_id(0) % leads
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * OWN
    row = lead * queries
    k_row = (lead // heads * (heads // GROUP) + lead % heads // GROUP) * keys
    steps = keys // TILE_K
    whole = steps
    if CAUSAL:
        steps = gl.minimum((first + OWN + TILE_K - 1) // TILE_K, steps)
        whole = gl.minimum(first // TILE_K, steps)

    q_mem = gl.allocate_shared_memory(q_desc.dtype, [HALVES, ROWS, DIM], q_desc.layout)
    k_mem = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS, TILE_K, DIM], k_desc.layout)
    v_mem = gl.allocate_shared_memory(v_desc.dtype, [BUFFERS, TILE_K, DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=HALVES)
        mbarrier.init(v_free.index(i), count=HALVES)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    if PING:
        mbarrier.arrive(turn.index(0), count=1)  # the first half begins

    if HALVES == 2:
        gl.warp_specialize([
            (_attend, (0, q_desc, y_desc, lse_ptr, q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free, turn,
                       first, row, scale, steps, whole, CAUSAL, DIM, ROWS, TILE_K, BUFFERS, num_warps, PING, PIN)),
            (_attend, (1, q_desc, y_desc, lse_ptr, q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free, turn,
                       first, row, scale, steps, whole, CAUSAL, DIM, ROWS, TILE_K, BUFFERS, num_warps, PING, PIN)),
            (_load, (q_desc, k_desc, v_desc, q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free, first, row,
                     k_row, steps, ROWS, HALVES, TILE_K, BUFFERS))], [num_warps, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_attend, (0, q_desc, y_desc, lse_ptr, q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free, turn,
                       first, row, scale, steps, whole, CAUSAL, DIM, ROWS, TILE_K, BUFFERS, num_warps, False, PIN)),
            (_load, (q_desc, k_desc, v_desc, q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free, first, row,
                     k_row, steps, ROWS, HALVES, TILE_K, BUFFERS))], [1], [24])


@gluon.jit
def _dq_step(dq, ds, i, q, dy, lse, delta, k_mem, v_mem, k_full, v_full, k_free, v_free, query, scale,
             DTYPE: gl.constexpr, ROWS: gl.constexpr, TILE_K: gl.constexpr, BUFFERS: gl.constexpr, MASK: gl.constexpr,
             FIRST: gl.constexpr, QK: gl.constexpr, A: gl.constexpr, PIN: gl.constexpr):
    at = i % BUFFERS
    mbarrier.wait(k_full.index(at), (i // BUFFERS) & 1)
    k = k_mem.index(at)
    score = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([ROWS, TILE_K], gl.float32, QK), use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(at), (i // BUFFERS) & 1)
    dp = warpgroup_mma(dy, v_mem.index(at).permute((1, 0)), gl.zeros([ROWS, TILE_K], gl.float32, QK), use_acc=False,
                       is_async=True)
    # The sum of the step before ends, too.
    score, dq, ds = warpgroup_mma_wait(1, deps=[score, dq, ds])
    if not FIRST:
        mbarrier.arrive(k_free.index((i - 1) % BUFFERS), count=1)
    if MASK:
        key = i * TILE_K + gl.arange(0, TILE_K, gl.SliceLayout(0, QK))
        score = gl.where(key[None, :] <= query[:, None], score, float("-inf"))
    p = gl.exp2(score * scale - lse[:, None])
    if PIN:
        _pinned(gl.sum(p, axis=1))
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(v_free.index(at), count=1)
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(DTYPE), A)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    return dq, ds


@gluon.jit
def _dq_of(half, q_desc, dq_desc, lse_ptr, delta_ptr, q_mem, dy_mem, y_mem, k_mem, v_mem, q_full, k_full, v_full,
           k_free, v_free, first, row, scale, log2e, steps, whole,
           CAUSAL: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, TILE_K: gl.constexpr, BUFFERS: gl.constexpr,
           WARPS: gl.constexpr, PIN: gl.constexpr):
    DTYPE: gl.constexpr = q_desc.dtype
    QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE_K, 16])
    PV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, PV, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, QK)
    query = first + half * ROWS + gl.arange(0, ROWS, ROW)
    lse = gl.load(lse_ptr + row + query)
    mbarrier.wait(q_full, 0)
    q = q_mem.index(half)
    dy = dy_mem.index(half)
    product = y_mem.index(half).load(PV).to(gl.float32) * dy.load(PV).to(gl.float32)
    delta = gl.convert_layout(gl.sum(product, axis=1), ROW)
    gl.store(delta_ptr + row + query, delta)
    dq = gl.zeros([ROWS, DIM], gl.float32, PV)
    ds = gl.zeros([ROWS, TILE_K], DTYPE, A)
    both = scale * log2e
    token, ds = _dq_step(dq, ds, 0, q, dy, lse, delta, k_mem, v_mem, k_full, v_full, k_free, v_free, query, both, DTYPE,
                         ROWS, TILE_K, BUFFERS, CAUSAL, True, QK, A, PIN)
    for i in range(1, whole):
        token, ds = _dq_step(token, ds, i, q, dy, lse, delta, k_mem, v_mem, k_full, v_full, k_free, v_free, query, both,
                             DTYPE, ROWS, TILE_K, BUFFERS, False, False, QK, A, PIN)
    if CAUSAL:
        for i in range(gl.maximum(whole, 1), steps):
            token, ds = _dq_step(token, ds, i, q, dy, lse, delta, k_mem, v_mem, k_full, v_full, k_free, v_free, query,
                                 both, DTYPE, ROWS, TILE_K, BUFFERS, True, False, QK, A, PIN)
    dq, ds = warpgroup_mma_wait(0, deps=[token, ds])
    q.store((dq * scale).to(DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, [row + first + half * ROWS, 0], q)
    tma.store_wait(0)


@gluon.jit
def _load_for_dq(q_desc, dy_desc, y_desc, k_desc, v_desc, q_mem, dy_mem, y_mem, k_mem, v_mem, q_full, k_full, v_full,
                 k_free, v_free, first, row, k_row, steps,
                 ROWS: gl.constexpr, TILE_K: gl.constexpr, BUFFERS: gl.constexpr):
    BYTES: gl.constexpr = 6 * ROWS * q_desc.block_type.shape[1] * 2
    mbarrier.expect(q_full, BYTES)
    for half in gl.static_range(2):
        at = row + first + half * ROWS
        tma.async_copy_global_to_shared(q_desc, [at, 0], q_full, q_mem.index(half))
        tma.async_copy_global_to_shared(dy_desc, [at, 0], q_full, dy_mem.index(half))
        tma.async_copy_global_to_shared(y_desc, [at, 0], q_full, y_mem.index(half))
    for i in range(steps):
        at = i % BUFFERS
        phase = (i // BUFFERS) & 1 ^ 1
        mbarrier.wait(k_free.index(at), phase)
        mbarrier.expect(k_full.index(at), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [k_row + i * TILE_K, 0], k_full.index(at), k_mem.index(at))
        mbarrier.wait(v_free.index(at), phase)
        mbarrier.expect(v_full.index(at), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [k_row + i * TILE_K, 0], v_full.index(at), v_mem.index(at))


@gluon.jit(do_not_specialize=["heads", "queries", "keys"])
def queries_gluon(q_desc, k_desc, v_desc, y_desc, dy_desc, dq_desc, lse_ptr, delta_ptr, heads, queries, keys, scale,
                  log2e, GROUP: gl.constexpr, CAUSAL: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr,
                  TILE_K: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr, PIN: gl.constexpr,
                  num_warps: gl.constexpr):
    """dq: two groups of warps with ROWS queries each, and one warp that loads."""
    OWN: gl.constexpr = ROWS * 2
    tiles = queries // OWN
    tile = gl.program_id(0) % tiles
    lead = gl.program_id(0) // tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * OWN
    row = lead * queries
    k_row = (lead // heads * (heads // GROUP) + lead % heads // GROUP) * keys
    steps = keys // TILE_K
    whole = steps
    if CAUSAL:
        steps = gl.minimum((first + OWN + TILE_K - 1) // TILE_K, steps)
        whole = gl.minimum(first // TILE_K, steps)
    q_mem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, DIM], q_desc.layout)
    dy_mem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, DIM], q_desc.layout)
    y_mem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, DIM], q_desc.layout)
    k_mem = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS, TILE_K, DIM], k_desc.layout)
    v_mem = gl.allocate_shared_memory(v_desc.dtype, [BUFFERS, TILE_K, DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_dq_of, (0, q_desc, dq_desc, lse_ptr, delta_ptr, q_mem, dy_mem, y_mem, k_mem, v_mem, q_full, k_full, v_full,
                  k_free, v_free, first, row, scale, log2e, steps, whole, CAUSAL, DIM, ROWS, TILE_K, BUFFERS, num_warps,
                  PIN)),
        (_dq_of, (1, q_desc, dq_desc, lse_ptr, delta_ptr, q_mem, dy_mem, y_mem, k_mem, v_mem, q_full, k_full, v_full,
                  k_free, v_free, first, row, scale, log2e, steps, whole, CAUSAL, DIM, ROWS, TILE_K, BUFFERS, num_warps,
                  PIN)),
        (_load_for_dq, (q_desc, dy_desc, y_desc, k_desc, v_desc, q_mem, dy_mem, y_mem, k_mem, v_mem, q_full, k_full,
                        v_full, k_free, v_free, first, row, k_row, steps, ROWS, TILE_K, BUFFERS))],
        [num_warps, 1], [REGISTERS, 24])
