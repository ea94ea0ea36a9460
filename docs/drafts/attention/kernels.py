"""Variants of the kernels of attention/03, in plain Triton. See README.txt."""
import triton
import triton.language as tl


@triton.jit
def _where_we_are(heads, queries, CAUSAL: tl.constexpr, OWN: tl.constexpr, ORDER: tl.constexpr, number):
    """First query, and the head of all sequences, of a program."""
    tiles = tl.cdiv(queries, OWN)
    if ORDER:  # the longest tiles of all heads first
        leads = tl.num_programs(0) // tiles if ORDER == 1 else heads
        tile = number // leads
        lead = number % leads
    else:
        tile = number % tiles
        lead = number // tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    return tile * OWN, lead


@triton.jit
def _powers(maximum, total, score, key0, limit, scale, TILE_K: tl.constexpr, MASK: tl.constexpr):
    """New maximum and sum, the factor of what was there, and the powers."""
    if MASK:
        key = key0 + tl.arange(0, TILE_K)
        score = tl.where(key[None, :] < limit, score, float("-inf"))
    new = tl.maximum(maximum, tl.max(score, axis=1) * scale)
    power = tl.exp2(score * scale - new[:, None])
    shrink = tl.exp2(maximum - new)
    total = total * shrink + tl.sum(power, axis=1)
    return new, total, shrink, power


@triton.jit
def _late_step(maximum, total, weighted, power, q, k_desc, v_desc, batch, head, start, limit, scale,
               DIM: tl.constexpr, TILE_K: tl.constexpr, MASK: tl.constexpr):
    k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    score = tl.dot(q, k.T)
    v = v_desc.load([batch, head, start - TILE_K, 0]).reshape(TILE_K, DIM)
    weighted = tl.dot(power, v, weighted)  # of the step before
    maximum, total, shrink, new = _powers(maximum, total, score, start, limit, scale, TILE_K, MASK)
    weighted = weighted * shrink[:, None]
    return maximum, total, weighted, new.to(v.dtype)


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def fwd_late(q_desc, k_desc, v_desc, y_desc, lse_ptr, rows, heads, queries, keys, scale,
             GROUP: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, DIM: tl.constexpr,
             TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
             ORDER: tl.constexpr = 0):
    """The product with v comes one step late, so it overlaps the powers of the next step."""
    first, lead = _where_we_are(heads, queries, CAUSAL, TILE_Q, ORDER, tl.program_id(0))
    query = first + tl.arange(0, TILE_Q)
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
    last = (end - 1) // TILE_K * TILE_K
    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, DIM), tl.float32)
    k = k_desc.load([batch, k_head, 0, 0]).reshape(TILE_K, DIM)
    maximum, total, _, power = _powers(maximum, total, tl.dot(q, k.T), 0, limit, scale, TILE_K, CAUSAL or RAGGED)
    power = power.to(k.dtype)
    for start in tl.range(TILE_K, whole, TILE_K, num_stages=STAGES):
        maximum, total, weighted, power = _late_step(
            maximum, total, weighted, power, q, k_desc, v_desc, batch, k_head, start, limit, scale, DIM, TILE_K, False)
    if CAUSAL:
        for start in tl.range(tl.maximum(whole, TILE_K), end, TILE_K, num_stages=STAGES):
            maximum, total, weighted, power = _late_step(
                maximum, total, weighted, power, q, k_desc, v_desc, batch, k_head, start, limit, scale, DIM, TILE_K, True)
    elif RAGGED:
        if whole > 0:
            maximum, total, weighted, power = _late_step(
                maximum, total, weighted, power, q, k_desc, v_desc, batch, k_head, whole, limit, scale, DIM, TILE_K, True)
    v = v_desc.load([batch, k_head, last, 0]).reshape(TILE_K, DIM)
    weighted = tl.dot(power, v, weighted)
    y = (weighted / total[:, None]).to(y_desc.dtype)
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, TILE_Q, DIM))
    tl.store(lse_ptr + lead.to(tl.int64) * rows + query, maximum + tl.log2(total))


@triton.jit
def _early_step(maximum, total, weighted, score, q, k_desc, v_desc, batch, head, start, limit, scale,
                DIM: tl.constexpr, TILE_K: tl.constexpr, MASK: tl.constexpr, NEXT: tl.constexpr):
    after = score
    if NEXT:
        k = k_desc.load([batch, head, start + TILE_K, 0]).reshape(TILE_K, DIM)
        after = tl.dot(q, k.T)
    maximum, total, shrink, power = _powers(maximum, total, score, start, limit, scale, TILE_K, MASK)
    weighted = weighted * shrink[:, None]
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    weighted = tl.dot(power.to(v.dtype), v, weighted)
    return maximum, total, weighted, after


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def fwd_early(q_desc, k_desc, v_desc, y_desc, lse_ptr, rows, heads, queries, keys, scale,
              GROUP: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, DIM: tl.constexpr,
              TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
              ORDER: tl.constexpr = 0):
    """The scores of the next step are begun before the powers of this one."""
    first, lead = _where_we_are(heads, queries, CAUSAL, TILE_Q, ORDER, tl.program_id(0))
    query = first + tl.arange(0, TILE_Q)
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
    last = (end - 1) // TILE_K * TILE_K
    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, DIM), tl.float32)
    k = k_desc.load([batch, k_head, 0, 0]).reshape(TILE_K, DIM)
    score = tl.dot(q, k.T)
    for start in tl.range(0, tl.minimum(whole, last), TILE_K, num_stages=STAGES):
        maximum, total, weighted, score = _early_step(
            maximum, total, weighted, score, q, k_desc, v_desc, batch, k_head, start, limit, scale, DIM, TILE_K, False, True)
    if CAUSAL:
        for start in tl.range(whole, last, TILE_K, num_stages=STAGES):
            maximum, total, weighted, score = _early_step(
                maximum, total, weighted, score, q, k_desc, v_desc, batch, k_head, start, limit, scale, DIM, TILE_K, True, True)
    maximum, total, weighted, score = _early_step(
        maximum, total, weighted, score, q, k_desc, v_desc, batch, k_head, last, limit, scale, DIM, TILE_K,
        CAUSAL or RAGGED, False)
    y = (weighted / total[:, None]).to(y_desc.dtype)
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, TILE_Q, DIM))
    tl.store(lse_ptr + lead.to(tl.int64) * rows + query, maximum + tl.log2(total))


@triton.jit
def _halves_step(m0, m1, t0, t1, w0, w1, q0, q1, k_desc, v_desc, batch, head, start, limit0, limit1, scale,
                 DIM: tl.constexpr, TILE_K: tl.constexpr, MASK: tl.constexpr):
    k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    s0 = tl.dot(q0, k.T)
    s1 = tl.dot(q1, k.T)
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    m0, t0, shrink0, p0 = _powers(m0, t0, s0, start, limit0, scale, TILE_K, MASK)
    w0 = tl.dot(p0.to(v.dtype), v, w0 * shrink0[:, None])
    m1, t1, shrink1, p1 = _powers(m1, t1, s1, start, limit1, scale, TILE_K, MASK)
    w1 = tl.dot(p1.to(v.dtype), v, w1 * shrink1[:, None])
    return m0, m1, t0, t1, w0, w1


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def fwd_halves(q_desc, k_desc, v_desc, y_desc, lse_ptr, rows, heads, queries, keys, scale,
               GROUP: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, DIM: tl.constexpr,
               TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
               ORDER: tl.constexpr = 0):
    """Two tiles of TILE_Q queries in a program: powers of one beside products of the other."""
    first, lead = _where_we_are(heads, queries, CAUSAL, 2 * TILE_Q, ORDER, tl.program_id(0))
    query0 = first + tl.arange(0, TILE_Q)
    query1 = query0 + TILE_Q
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP
    limit0 = keys
    limit1 = keys
    whole = keys // TILE_K * TILE_K
    end = keys
    if CAUSAL:
        limit0 = tl.minimum(query0 + 1, keys)[:, None]
        limit1 = tl.minimum(query1 + 1, keys)[:, None]
        whole = tl.minimum(first // TILE_K * TILE_K, whole)
        end = tl.minimum(first + 2 * TILE_Q, keys)
    q0 = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    q1 = q_desc.load([batch, head, first + TILE_Q, 0]).reshape(TILE_Q, DIM)
    m0 = tl.full((TILE_Q,), float("-inf"), tl.float32)
    m1 = m0
    t0 = tl.zeros((TILE_Q,), tl.float32)
    t1 = t0
    w0 = tl.zeros((TILE_Q, DIM), tl.float32)
    w1 = w0
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
        m0, m1, t0, t1, w0, w1 = _halves_step(
            m0, m1, t0, t1, w0, w1, q0, q1, k_desc, v_desc, batch, k_head, start, limit0, limit1, scale, DIM, TILE_K, False)
    if CAUSAL:
        for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
            m0, m1, t0, t1, w0, w1 = _halves_step(
                m0, m1, t0, t1, w0, w1, q0, q1, k_desc, v_desc, batch, k_head, start, limit0, limit1, scale, DIM, TILE_K, True)
    elif RAGGED:
        m0, m1, t0, t1, w0, w1 = _halves_step(
            m0, m1, t0, t1, w0, w1, q0, q1, k_desc, v_desc, batch, k_head, whole, limit0, limit1, scale, DIM, TILE_K, True)
    at = lse_ptr + lead.to(tl.int64) * rows
    y = (w0 / t0[:, None]).to(y_desc.dtype)
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, TILE_Q, DIM))
    tl.store(at + query0, m0 + tl.log2(t0))
    if first + TILE_Q < queries:
        y = (w1 / t1[:, None]).to(y_desc.dtype)
        y_desc.store([batch, head, first + TILE_Q, 0], y.reshape(1, 1, TILE_Q, DIM))
        tl.store(at + query1, m1 + tl.log2(t1))


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def fwd_plain(q_desc, k_desc, v_desc, y_desc, lse_ptr, rows, heads, queries, keys, scale,
              GROUP: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, DIM: tl.constexpr,
              TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
              ORDER: tl.constexpr = 0, WS: tl.constexpr = False, CHECK: tl.constexpr = False):
    """The page's kernel; ORDER of programs, warp_specialize, or no shrinking where no maximum grows."""
    first, lead = _where_we_are(heads, queries, CAUSAL, TILE_Q, ORDER, tl.program_id(0))
    query = first + tl.arange(0, TILE_Q)
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
    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, DIM), tl.float32)
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES, warp_specialize=WS):
        k = k_desc.load([batch, k_head, start, 0]).reshape(TILE_K, DIM)
        maximum, total, shrink, power = _powers(maximum, total, tl.dot(q, k.T), start, limit, scale, TILE_K, False)
        v = v_desc.load([batch, k_head, start, 0]).reshape(TILE_K, DIM)
        if CHECK:
            if tl.min(shrink) < 1:
                weighted = weighted * shrink[:, None]
        else:
            weighted = weighted * shrink[:, None]
        weighted = tl.dot(power.to(v.dtype), v, weighted)
    if CAUSAL:
        for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
            k = k_desc.load([batch, k_head, start, 0]).reshape(TILE_K, DIM)
            maximum, total, shrink, power = _powers(maximum, total, tl.dot(q, k.T), start, limit, scale, TILE_K, True)
            v = v_desc.load([batch, k_head, start, 0]).reshape(TILE_K, DIM)
            weighted = tl.dot(power.to(v.dtype), v, weighted * shrink[:, None])
    elif RAGGED:
        k = k_desc.load([batch, k_head, whole, 0]).reshape(TILE_K, DIM)
        maximum, total, shrink, power = _powers(maximum, total, tl.dot(q, k.T), whole, limit, scale, TILE_K, True)
        v = v_desc.load([batch, k_head, whole, 0]).reshape(TILE_K, DIM)
        weighted = tl.dot(power.to(v.dtype), v, weighted * shrink[:, None])
    y = (weighted / total[:, None]).to(y_desc.dtype)
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, TILE_Q, DIM))
    tl.store(lse_ptr + lead.to(tl.int64) * rows + query, maximum + tl.log2(total))
