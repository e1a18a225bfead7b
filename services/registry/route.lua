-- Choose a worker for each of some requests by cost in seconds, and reserve it.
-- KEYS w, wi, ver, wv, wn, sc   ARGV now_ms ('' = the store's clock), num_buckets, spec_buckets,
-- reserve_ms, spec_grace_ms, weights (doubles), candidates, pairs; then per request: reservation
-- id ('' = reserve nothing), hashes (8 bytes a stride), ask (doubles), excluded slots (u16 each).
-- The arithmetic is that of cost.py, in its order: twin and script agree to the last bit. Tables
-- and closures are most of what a decision costs: few are made, each whole, some for all requests.
local now = tonumber(ARGV[1])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local buckets, spec_buckets = tonumber(ARGV[2]), tonumber(ARGV[3])
local reserve_ms, spec_grace_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
local displacement, tie_s, tie_ratio, usual_rate, usual_a, usual_b, fixed_s, link_token_s, stall,
  hold = struct.unpack('<dddddddddd', ARGV[6])
local call, unpack_bytes, pack_bytes = redis.call, struct.unpack, struct.pack
local max, min = math.max, math.min
local base = KEYS[1]:sub(1, -2)
local q, rz, b_, s_ = base .. 'q', base .. 'rz', base .. 'b:', base .. 's:'
local REMOTE, LOCAL, STAY, DECODE = 1, 2, 3, 4
local BLOCK_TOKENS, STRIDE_TOKENS = 16, 64
local MAX_ROWS, SHORTLIST, MAX_OPTIONS, SWEEP = 64, 8, 8, 16
local MAX_SPEC_OWNERS, SPEC_BUCKET_FIELDS = 8, 48
local MAX_PREFILL_MS = 120000

local by_slot, prefill_rows, decode_rows = {}, {}, {}

-- Reservations: per slot `q` holds gen, in_flight, epoch, tokens of this epoch and of the one
-- before (prefill, resident each), when the epoch began and when something was booked last.
local ACCOUNT = '<HHIIIIIdd'
local function read_account(packed, gen)
  if packed and #packed == 40 and unpack_bytes('<H', packed) == gen then
    return unpack_bytes(ACCOUNT, packed)
  end
  return gen, 0, 0, 0, 0, 0, 0, now, now
end
-- End what a reservation held of a slot's account. `epoch` nil: only its place among those in flight.
local function end_booked(slot, gen, num_ended, epoch, pf, res)
  local packed = call('HGET', q, slot)
  if not packed or #packed ~= 40 or unpack_bytes('<H', packed) ~= gen then return end
  local _, in_flight, now_epoch, now_pf, now_res, old_pf, old_res, began, newest =
    unpack_bytes(ACCOUNT, packed)
  in_flight = max(0, in_flight - num_ended)
  if epoch == now_epoch then
    now_pf, now_res = max(0, now_pf - pf), max(0, now_res - res)
  elseif epoch == now_epoch - 1 then
    old_pf, old_res = max(0, old_pf - pf), max(0, old_res - res)
  end
  call('HSET', q, slot, pack_bytes(ACCOUNT, gen, in_flight, now_epoch, now_pf, now_res, old_pf,
    old_res, began, newest))
  local row = by_slot[slot]
  if row and row.gen == gen then
    row.in_flight, row.pf, row.res = in_flight, now_pf + old_pf, now_res + old_res
  end
end

-- Reservations that were never released end here, a few a call.
for _, member in ipairs(call('ZRANGEBYSCORE', rz, '-inf', now, 'LIMIT', 0, SWEEP)) do
  call('ZREM', rz, member)
  if #member > 4 then
    local slot, gen = unpack_bytes('<HH', member)
    local key = base .. 'r:' .. member:sub(5)
    local held = call('GET', key)
    -- The id may be another reservation's by now.
    if held and held:sub(1, 4) == member:sub(1, 4) then call('DEL', key) end
    end_booked(slot, gen, 1)
  end
end

-- Candidates as they are now. One whose slot changed hands or whose lease ran out is none.
local listed = ARGV[7]
if #listed >= 20 then
  local slots = {}
  for at = 1, #listed - 19, 20 do slots[#slots + 1] = (unpack_bytes('<H', listed, at)) end
  local records = call('HMGET', KEYS[1], unpack(slots))
  local accounts = call('HMGET', q, unpack(slots))
  for i, slot in ipairs(slots) do
    local record = records[i]
    if record and #record == 64 and record:byte(4) == 1 then
      local _, wanted, role, seed, newness = unpack_bytes('<HHBxxxId', listed, i * 20 - 19)
      local gen, _, _, running, waiting, deadline, queued, resident, kv_free, kv_total, rate, a, b,
        _, _, kv_cached = unpack_bytes('<HBBHHdIIIIfffdII', record)
      if gen == wanted and deadline > now then
        local work, room = 1, math.huge
        if kv_total > 0 then
          work = 1 + displacement * (1 - max(0, min(kv_free, kv_total) - kv_cached) / kv_total)
          room = kv_free * BLOCK_TOKENS
        end
        if not (rate >= 1 and rate < 1e12) then rate = usual_rate end
        if a > 0 and a < 1e12 then
          b = b >= 0 and b < 1e12 and b or 0
        else
          a, b = usual_a, usual_b
        end
        local _, in_flight, _, pf, res, old_pf, old_res = read_account(accounts[i], gen)
        local row = {
          false, false, false, false, -- the cost of each kind, where it is possible
          slot = slot, gen = gen, seed = seed, newness = newness, rate = rate, tbt_a = a, tbt_b = b,
          work = work, running = running, waiting = waiting, queued_tokens = queued,
          resident_tokens = resident, room = room, in_flight = in_flight, pf = pf + old_pf,
          res = res + old_res, hit = 0, hint = 0, queued = 0, uncached = 0, prefill_s = 0,
          tbt_s = 0, resident = 0, has_room = false, partner = false,
        }
        local rows = role == 1 and prefill_rows or decode_rows
        rows[#rows + 1] = row
        by_slot[slot] = row
      end
    end
  end
end
local pairs_s -- prefill slot -> decode slot -> seconds a token, < 0 = must not
for at = 1, #ARGV[8] - 11, 12 do
  local p, d, token_s = unpack_bytes('<HHd', ARGV[8], at)
  pairs_s = pairs_s or {}
  pairs_s[p] = pairs_s[p] or {}
  pairs_s[p][d] = token_s
end

-- The request at hand.
local packed, canon, confirmed
local tokens, decode_tokens, need, bypass, max_tbt_s, root, force, source

-- Owners of a stride, each with a level, higher for better tiers, and the sum of the levels.
local NOBODY = {}
local function owners(i, within)
  local field = packed:sub(i * 8 - 7, i * 8)
  local value = call('HGET', b_ .. (unpack_bytes('<H', field) % buckets), field)
  if not value then return NOBODY, 0 end
  local set, sum = {}, 0
  for at = 1, #value - 3, 4 do
    local tagged, gen = unpack_bytes('<HH', value, at)
    local slot, level = tagged % 16384, 3 - (tagged - tagged % 16384) / 16384
    local row = by_slot[slot]
    if row and row.gen == gen and level > 0 and (not within or within[slot]) then
      if within then level = min(level, within[slot]) end
      if level > (set[slot] or 0) then
        sum = sum + level - (set[slot] or 0)
        set[slot] = level
      end
    end
  end
  return set, sum
end
local function speculated(i, within)
  local field = packed:sub(canon[i] * 8 - 7, canon[i] * 8)
  local value = call('HGET', s_ .. (unpack_bytes('<H', field) % spec_buckets), field)
  if not value and confirmed == NOBODY then return NOBODY, 0 end
  local set, sum = {}, 0
  for at = 1, value and #value - 7 or 0, 8 do
    local slot, gen, expiry_s = unpack_bytes('<HHI', value, at)
    local row = by_slot[slot]
    if row and row.gen == gen and expiry_s * 1000 > now and not set[slot]
      and (not within or within[slot]) then
      set[slot] = 1
      sum = sum + 1
    end
  end
  for slot, strides in pairs(confirmed) do
    if strides >= canon[i] and not set[slot] and (not within or within[slot]) then
      set[slot] = 1
      sum = sum + 1
    end
  end
  return set, sum
end

-- Depth by bisection: owner sets only shrink with depth, so look only where they differ. A level l
-- counts for all levels below it.
local function bisect(look, out, lo, hi, at_lo, sum_lo, at_hi, sum_hi)
  if sum_lo == sum_hi then return end
  if hi - lo == 1 then
    for slot, level in pairs(at_lo) do
      for l = (at_hi[slot] or 0) + 1, level do out[l][slot] = lo end
    end
    return
  end
  local mid = math.floor((lo + hi) / 2)
  local at_mid, sum_mid = look(mid, at_lo)
  bisect(look, out, lo, mid, at_lo, sum_lo, at_mid, sum_mid)
  local still, sum_still = {}, 0
  for slot, level in pairs(at_hi) do
    local l = at_mid[slot]
    if l then
      l = min(l, level)
      still[slot] = l
      sum_still = sum_still + l
    end
  end
  bisect(look, out, mid, hi, at_mid, sum_mid, still, sum_still)
end
local function depths(look, n)
  local first, sum_first = look(1, nil)
  if sum_first == 0 then return NOBODY, NOBODY, NOBODY end
  local out = {{}, {}, {}}
  for slot, level in pairs(first) do
    for l = 1, level do out[l][slot] = n end
  end
  if n > 1 then
    local last, sum_last = look(n, first)
    bisect(look, out, 1, n, first, sum_first, last, sum_last)
  end
  return out[1], out[2], out[3]
end

local function price(rows)
  local total, others = 0, #rows - 1
  for i = 1, #rows do
    local row = rows[i]
    local queued = row.queued_tokens + row.pf
    row.queued = queued
    total = total + queued
  end
  for i = 1, #rows do
    local row = rows[i]
    local queued, uncached = row.queued, tokens - min(row.hit, tokens - 1)
    if row.newness > 0 and others > 0 then
      local missing = (total - queued) / others - queued
      if missing > 0 then queued = queued + row.newness * missing end
      row.queued = queued
    end
    local resident = row.resident_tokens + row.res
    row.uncached, row.resident = uncached, resident
    row.prefill_s = (queued + uncached * row.work) / row.rate
    row.tbt_s = (row.tbt_a * (1 + 0.05 * (row.waiting + row.in_flight))
      + row.tbt_b * (resident + need)) / 1e6
    row.has_room = row.room - row.res >= need
  end
end
local function link_s(p_slot, d)
  local of_p = pairs_s and p_slot and pairs_s[p_slot]
  local token_s = of_p and of_p[d.slot] or link_token_s
  if token_s < 0 then return nil end
  return token_s * (tokens - min(d.hint, tokens))
end
-- Where the KV of a prefill worker would best go: fits, seconds, slot; link and decode of them.
local function best_partner(p_slot, decode)
  local best, fits, best_s, slot, best_link_s, best_decode_s
  for i = 1, #decode do
    local d = decode[i]
    local moving_s = link_s(p_slot, d)
    if moving_s then
      local decode_s = decode_tokens * d.tbt_s
      local s, is_less = moving_s + decode_s, not best
      if best then
        if d.has_room ~= fits then
          is_less = d.has_room
        elseif s ~= best_s then
          is_less = s < best_s
        else
          is_less = d.slot < slot
        end
      end
      if is_less then
        best, fits, best_s, slot, best_link_s, best_decode_s =
          d, d.has_room, s, d.slot, moving_s, decode_s
      end
    end
  end
  return best and {fits = fits, slot = slot, link_s = best_link_s, decode_s = best_decode_s}
end

local function fits_of(kind, row)
  if kind == REMOTE then return row.partner.fits end
  return row.has_room
end
-- What an option adds to the prefill: handoff, decode, what others lose by it; and the partner.
local function parts(kind, row)
  if kind == REMOTE then
    local partner = row.partner
    return fixed_s + partner.link_s, partner.decode_s, 0, partner.slot
  end
  local decode_s = decode_tokens * row.tbt_s
  if kind == STAY then return 0, decode_s, hold * decode_s, -1 end
  if kind == LOCAL then
    return 0, decode_s, stall * row.running * (row.uncached / row.rate), -1
  end
  return link_s(source, row), decode_s, 0, -1
end
-- The best options so far, in order: the cheapest of those that fit, then the cheapest others.
local top_kinds, top_rows, num_top = {}, {}, 0
local function offer(kind, row)
  local handoff_s, decode_s, extra_s = parts(kind, row)
  local cost_s = (kind == DECODE and 0 or row.prefill_s) + handoff_s + decode_s + extra_s
  row[kind] = cost_s
  local at, fits = num_top, fits_of(kind, row)
  while at > 0 do
    local k, o = top_kinds[at], top_rows[at]
    local their_s, is_before = o[k], false
    if fits ~= fits_of(k, o) then
      is_before = fits
    elseif cost_s ~= their_s then
      is_before = cost_s < their_s
    elseif kind ~= k then
      is_before = kind < k
    else
      is_before = row.slot < o.slot
    end
    if not is_before then break end
    top_kinds[at + 1], top_rows[at + 1] = k, o
    at = at - 1
  end
  if at < MAX_OPTIONS then
    top_kinds[at + 1], top_rows[at + 1] = kind, row
    num_top = min(MAX_OPTIONS, num_top + 1)
  end
end
local function mul32(a, b)
  local lo = a % 65536
  return ((a - lo) / 65536 * b % 65536 * 65536 + lo * b) % 4294967296
end
local function rank(row)
  local v = bit.bxor(root, row.seed) % 4294967296
  v = mul32(bit.bxor(v, bit.rshift(v, 16)) % 4294967296, 0x7feb352d)
  v = mul32(bit.bxor(v, bit.rshift(v, 15)) % 4294967296, 0x846ca68b)
  return bit.bxor(v, bit.rshift(v, 16)) % 4294967296
end
local function pack_option(kind, row)
  local handoff_s, decode_s, extra_s, partner = parts(kind, row)
  return pack_bytes('<HBBhHdddddddddd', row.slot, kind, fits_of(kind, row) and 1 or 0, partner,
    row.in_flight, row[kind], kind == DECODE and 0 or row.prefill_s, handoff_s, decode_s,
    extra_s, row.queued, row.uncached, row.hit, row.hint, row.resident)
end

local function speculate(stride, slot, gen, expiry_s)
  local field = packed:sub(stride * 8 - 7, stride * 8)
  local key = s_ .. (unpack_bytes('<H', field) % spec_buckets)
  local value, kept, num_kept = call('HGET', key, field), '', 0
  for at = 1, value and #value - 7 or 0, 8 do
    local its_slot, its_gen, until_s = unpack_bytes('<HHI', value, at)
    if its_slot == slot and its_gen == gen then
      expiry_s = max(expiry_s, until_s)
    elseif until_s * 1000 > now and num_kept < MAX_SPEC_OWNERS - 1 then
      kept, num_kept = kept .. value:sub(at, at + 7), num_kept + 1
    end
  end
  local is_new = call('HSET', key, field, kept .. pack_bytes('<HHI', slot, gen, expiry_s)) == 1
  if not is_new or call('HLEN', key) <= SPEC_BUCKET_FIELDS then return end
  -- The bucket has grown large: what has run out leaves it.
  local all = call('HGETALL', key)
  for j = 1, #all, 2 do
    local is_alive = false
    for at = 1, #all[j + 1] - 7, 8 do
      local _, _, until_s = unpack_bytes('<HHI', all[j + 1], at)
      is_alive = is_alive or until_s * 1000 > now
    end
    if not is_alive then call('HDEL', key, all[j]) end
  end
end
-- Above MAX_ROWS only the promising are priced in full: by hit and by load, in their old order.
local function shortlist(rows, load)
  local kept, short, sorted = {}, {}, {}
  for i, row in ipairs(rows) do sorted[i] = row end
  local function keep_first(better)
    table.sort(sorted, better)
    for i = 1, min(SHORTLIST, #sorted) do kept[sorted[i].slot] = true end
  end
  keep_first(function(x, y)
    if x.hit ~= y.hit then return x.hit > y.hit end
    return x.slot < y.slot
  end)
  keep_first(function(x, y)
    if load(x) ~= load(y) then return load(x) < load(y) end
    return x.slot < y.slot
  end)
  for _, row in ipairs(rows) do
    if kept[row.slot] then short[#short + 1] = row end
  end
  return short
end

-- One request after the other; each sees what was reserved for those before it.
local answers = {}
for at = 9, #ARGV - 3, 4 do
  local rid, excluded_slots = ARGV[at], ARGV[at + 3]
  packed = ARGV[at + 1]
  tokens, decode_tokens, need, bypass, max_tbt_s, root, force, source =
    unpack_bytes('<dddddddd', ARGV[at + 2])
  local is_new = force ~= DECODE

  -- Who may: all, but for those the request excludes.
  local prefill, decode = prefill_rows, decode_rows
  if excluded_slots ~= '' then
    local excluded = {}
    for i = 1, #excluded_slots - 1, 2 do
      excluded[(unpack_bytes('<H', excluded_slots, i))] = true
    end
    prefill, decode = {}, {}
    for _, row in ipairs(prefill_rows) do
      if not excluded[row.slot] then prefill[#prefill + 1] = row end
    end
    for _, row in ipairs(decode_rows) do
      if not excluded[row.slot] then decode[#decode + 1] = row end
    end
  end

  -- What they hold. Speculation is kept for a few strides, so that a long prompt costs few writes.
  local n, disk, host, spec = math.floor(#packed / 8), NOBODY, NOBODY, NOBODY
  canon, confirmed = NOBODY, NOBODY
  if n > 0 then
    disk, host, confirmed = depths(owners, n)
    canon = {}
    for c = 8, min(n, 256), 8 do canon[#canon + 1] = c end
    for c = 320, n, 64 do canon[#canon + 1] = c end
    if canon[#canon] ~= n then canon[#canon + 1] = n end
    spec = depths(speculated, #canon)
  end
  for slot, row in pairs(by_slot) do
    local hint = 0
    if disk[slot] then
      local gpu, gpu_or_host = confirmed[slot] or 0, host[slot] or 0
      hint = STRIDE_TOKENS
        * (gpu + 0.9 * (gpu_or_host - gpu) + 0.5 * (disk[slot] - gpu_or_host))
    end
    row.hint, row.hit = hint, hint
    if spec[slot] then row.hit = max(hint, STRIDE_TOKENS * canon[spec[slot]]) end
  end

  price(decode)
  if is_new then price(prefill) end
  if #prefill + #decode > MAX_ROWS then
    decode = shortlist(decode, function(row) return row.tbt_s end)
    if is_new then prefill = shortlist(prefill, function(row) return row.queued / row.rate end) end
  end

  -- All there is to choose from.
  local can_remote = false
  num_top = 0
  if is_new then
    local usual = #prefill > 0 and best_partner(nil, decode) -- of all without a pair of their own
    for i = 1, #prefill do
      local p, best = prefill[i], usual
      if pairs_s and pairs_s[p.slot] then best = best_partner(p.slot, decode) end
      p[REMOTE], p.partner = false, best
      if best then
        can_remote = true
        if force == 0 or force == REMOTE then offer(REMOTE, p) end
      end
    end
    if force == 0 or force == LOCAL then
      for i = 1, #decode do
        local d = decode[i]
        d[LOCAL] = false
        if force == LOCAL or not can_remote
          or d.uncached <= bypass and (max_tbt_s == 0 or d.tbt_s <= max_tbt_s) then
          offer(LOCAL, d)
        end
      end
    end
    if force == 0 or force == STAY then
      for i = 1, #prefill do offer(STAY, prefill[i]) end
    end
  else
    for i = 1, #decode do
      local d = decode[i]
      d[DECODE] = false
      if d.slot ~= source and link_s(source, d) then offer(DECODE, d) end
    end
  end

  if num_top == 0 then
    answers[#answers + 1] = {'NONE'}
  else
    -- Of what costs hardly more than the best: the longest hit, the shorter queue, the rank.
    local kind, chosen, chosen_rank = top_kinds[1], top_rows[1], nil
    local fits, scale_s = fits_of(kind, chosen), is_new and chosen.prefill_s or chosen[kind]
    local limit_s = chosen[kind] + max(tie_s, tie_ratio * scale_s)
    local rows = (kind == REMOTE or kind == STAY) and prefill or decode
    for i = 1, #rows do
      local row = rows[i]
      local is_tie = row[kind] and row[kind] <= limit_s and fits_of(kind, row) == fits
      if is_tie and row ~= chosen then
        local is_better, row_rank
        local _, octave = math.frexp(row.queued)
        local _, chosen_octave = math.frexp(chosen.queued)
        if row.hit ~= chosen.hit then
          is_better = row.hit > chosen.hit
        elseif octave ~= chosen_octave then
          is_better = octave < chosen_octave
        elseif row.in_flight ~= chosen.in_flight then
          is_better = row.in_flight < chosen.in_flight
        else
          chosen_rank, row_rank = chosen_rank or rank(chosen), rank(row)
          is_better = row_rank > chosen_rank or row_rank == chosen_rank and row.slot < chosen.slot
        end
        if is_better then chosen, chosen_rank = row, row_rank end
      end
    end

    local told = {pack_option(kind, chosen)}
    for i = 1, num_top do
      if #told < MAX_OPTIONS and (top_rows[i] ~= chosen or top_kinds[i] ~= kind) then
        told[#told + 1] = pack_option(top_kinds[i], top_rows[i])
      end
    end
    answers[#answers + 1] = {'OK', chosen.gen, can_remote and 1 or 0, table.concat(told)}

    if rid ~= '' then
      -- What an id held ends when it is reserved again: a request that is begun anew counts once.
      local held = call('GET', base .. 'r:' .. rid)
      if held and #held == 16 then
        local slot, gen, epoch, pf, res = unpack_bytes('<HHIII', held)
        end_booked(slot, gen, call('ZREM', rz, held:sub(1, 4) .. rid), epoch, pf, res)
      end
      local slot, gen = chosen.slot, chosen.gen
      local _, in_flight, epoch, now_pf, now_res, old_pf, old_res, began =
        read_account(call('HGET', q, slot), gen)
      local head = pack_bytes('<HH', slot, gen)
      local pf, res = is_new and math.ceil(chosen.uncached) or 0, kind == REMOTE and 0 or need
      call('SET', base .. 'r:' .. rid, head .. pack_bytes('<III', epoch, pf, res), 'PX', reserve_ms)
      -- `r:` may have run out before the sweep got as far: then it is counted still, and not twice.
      in_flight = min(65535, in_flight + call('ZADD', rz, now + reserve_ms, head .. rid))
      now_pf, now_res = min(4294967295, now_pf + pf), min(4294967295, now_res + res)
      call('HSET', q, slot, pack_bytes(ACCOUNT, gen, in_flight, epoch, now_pf, now_res, old_pf,
        old_res, began, now))
      chosen.in_flight, chosen.pf, chosen.res = in_flight, now_pf + old_pf, now_res + old_res

      -- The worker will hold this prompt once its prefill is over: let others know by then.
      local done_ms = now + min(MAX_PREFILL_MS, math.ceil(chosen.prefill_s * 1000))
      local expiry_s = math.ceil((done_ms + spec_grace_ms) / 1000)
      for i = 1, is_new and #canon or 0 do
        if canon[i] > (confirmed[slot] or 0) then speculate(canon[i], slot, gen, expiry_s) end
      end
    end
  end
end
return answers
