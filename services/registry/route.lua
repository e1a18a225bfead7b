-- Choose a worker for each of some requests by cost in seconds, and reserve it.
-- KEYS w, wi, ver, wv, wn, sc   ARGV now_ms ('' = the store's clock), num_buckets, spec_buckets,
-- reserve_ms, spec_grace_ms, weights (doubles), candidates, pairs; then per request: reservation
-- id ('' = reserve nothing), hashes (8 bytes a stride), ask (doubles), excluded slots (u16 each).
-- The arithmetic is that of cost.py, in its order: twin and script agree to the last bit.
local now = tonumber(ARGV[1])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local buckets, spec_buckets = tonumber(ARGV[2]), tonumber(ARGV[3])
local reserve_ms, spec_grace_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
local displacement, tie_s, tie_ratio, usual_rate, usual_a, usual_b, fixed_s, link_token_s, stall,
  hold = struct.unpack('<dddddddddd', ARGV[6])
local base = KEYS[1]:sub(1, -2)
local REMOTE, LOCAL, STAY, DECODE = 1, 2, 3, 4
local BLOCK_TOKENS, STRIDE_TOKENS = 16, 64
local MAX_ROWS, SHORTLIST, MAX_OPTIONS, SWEEP = 64, 8, 16, 16
local MAX_SPEC_OWNERS, SPEC_BUCKET_FIELDS, SPEC_KEEP_MS = 8, 48, 300000
local MAX_PREFILL_MS = 120000

-- Reservations: per slot `q` holds gen, in_flight, epoch, tokens of this epoch and of the one
-- before (prefill, resident each), when the epoch began and when something was booked last.
local function read_booked(packed, gen)
  local own, in_flight, epoch, pf, res, old_pf, old_res, began, newest
  if packed and #packed == 40 then
    own, in_flight, epoch, pf, res, old_pf, old_res, began, newest =
      struct.unpack('<HHIIIIIdd', packed)
  end
  if own ~= gen then
    in_flight, epoch, pf, res, old_pf, old_res, began, newest = 0, 0, 0, 0, 0, 0, now, now
  end
  return {gen = gen, in_flight = in_flight, epoch = epoch, pf = pf, res = res, old_pf = old_pf,
    old_res = old_res, began = began, newest = newest}
end
local function write_booked(slot, b)
  redis.call('HSET', base .. 'q', slot, struct.pack('<HHIIIIIdd', b.gen, b.in_flight, b.epoch,
    b.pf, b.res, b.old_pf, b.old_res, b.began, b.newest))
end

-- Reservations that were never released end here, a few a call.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', base .. 'rz', '-inf', now, 'LIMIT', 0, SWEEP)) do
  redis.call('ZREM', base .. 'rz', member)
  if #member > 4 then
    local slot, gen = struct.unpack('<HH', member)
    local key = base .. 'r:' .. member:sub(5)
    local held = redis.call('GET', key)
    -- The id may be another reservation's by now.
    if held and held:sub(1, 4) == member:sub(1, 4) then redis.call('DEL', key) end
    local packed = redis.call('HGET', base .. 'q', slot)
    if packed and #packed == 40 and struct.unpack('<H', packed) == gen then
      local b = read_booked(packed, gen)
      b.in_flight = math.max(0, b.in_flight - 1)
      write_booked(slot, b)
    end
  end
end

-- Candidates as they are now. One whose slot changed hands or whose lease ran out is none. Tables
-- are made with all their fields at once: growing them is most of what a decision would cost.
local rows, by_slot = {}, {}
local function sane(v) return v >= 0 and v < 1e12 and v or 0 end
if #ARGV[7] >= 20 then
  local slots = {}
  for at = 1, #ARGV[7] - 19, 20 do slots[#slots + 1] = (struct.unpack('<H', ARGV[7], at)) end
  local records = redis.call('HMGET', KEYS[1], unpack(slots))
  local booked = redis.call('HMGET', base .. 'q', unpack(slots))
  for i, slot in ipairs(slots) do
    local rec = records[i]
    if rec and #rec == 64 and rec:byte(4) == 1 then
      local _, wanted, role, seed, newness = struct.unpack('<HHBxxxId', ARGV[7], i * 20 - 19)
      local gen, _, _, running, waiting, deadline, queued, resident, kv_free, kv_total, rate, tbt_a,
        tbt_b, _, _, kv_cached = struct.unpack('<HBBHHdIIIIfffdII', rec)
      if gen == wanted and deadline > now then
        local row = {slot = slot, gen = gen, is_prefill = role == 1, seed = seed, newness = newness,
          running = running, waiting = waiting, queued_tokens = queued, resident_tokens = resident,
          kv_free = kv_free, kv_total = kv_total, kv_cached = kv_cached, rate = sane(rate),
          tbt_a = sane(tbt_a), tbt_b = sane(tbt_b), booked = read_booked(booked[i], gen), hint = 0, hit = 0, queued = 0,
          uncached = 0, use_rate = 0, prefill_s = 0, resident = 0, tbt_s = 0, fits = true}
        rows[#rows + 1] = row
        by_slot[slot] = row
      end
    end
  end
end
local pairs_s = {} -- prefill slot -> decode slot -> seconds a token, < 0 = must not
for at = 1, #ARGV[8] - 11, 12 do
  local p, d, token_s = struct.unpack('<HHd', ARGV[8], at)
  pairs_s[p] = pairs_s[p] or {}
  pairs_s[p][d] = token_s
end

local function mul32(a, b)
  local hi, lo = math.floor(a / 65536), a % 65536
  return ((hi * b) % 65536 * 65536 + lo * b) % 4294967296
end
local function mix32(v)
  v = bit.bxor(v, bit.rshift(v, 16)) % 4294967296
  v = mul32(v, 0x7feb352d)
  v = bit.bxor(v, bit.rshift(v, 15)) % 4294967296
  v = mul32(v, 0x846ca68b)
  return bit.bxor(v, bit.rshift(v, 16)) % 4294967296
end

-- Depth by bisection: owner sets only shrink with depth, so look only where they differ. A set
-- holds a level for each slot, higher for better tiers; a level l counts for all levels below it.
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
      l = math.min(l, level)
      still[slot] = l
      sum_still = sum_still + l
    end
  end
  bisect(look, out, mid, hi, at_mid, sum_mid, still, sum_still)
end
local function depths(look, n)
  local out = {{}, {}, {}}
  if n == 0 then return out end
  local first, sum_first = look(1, nil)
  for slot, level in pairs(first) do
    for l = 1, level do out[l][slot] = n end
  end
  if n > 1 and sum_first > 0 then
    local last, sum_last = look(n, first)
    bisect(look, out, 1, n, first, sum_first, last, sum_last)
  end
  return out
end
local function spec_key(field) return base .. 's:' .. (struct.unpack('<H', field) % spec_buckets) end

-- Strides that speculation is kept for: a few, so that a long prompt costs a few writes.
local function canonical(n)
  local list = {}
  for c = 8, math.min(n, 256), 8 do list[#list + 1] = c end
  for c = 320, n, 64 do list[#list + 1] = c end
  if n > 0 and list[#list] ~= n then list[#list + 1] = n end
  return list
end

-- Set hit and hint of every row for a prompt; return the confirmed depth of each slot.
local function find_hits(packed)
  local n = math.floor(#packed / 8)
  local function field_at(i) return packed:sub(i * 8 - 7, i * 8) end
  local function owners(i, within)
    local field = field_at(i)
    local value = redis.call('HGET', base .. 'b:' .. (struct.unpack('<H', field) % buckets), field)
      or ''
    local set, sum = {}, 0
    for at = 1, #value - 3, 4 do
      local tagged, gen = struct.unpack('<HH', value, at)
      local slot, level = tagged % 16384, 3 - math.floor(tagged / 16384)
      local row = by_slot[slot]
      if row and row.gen == gen and level > 0 and (not within or within[slot]) then
        if within then level = math.min(level, within[slot]) end
        if level > (set[slot] or 0) then
          sum = sum + level - (set[slot] or 0)
          set[slot] = level
        end
      end
    end
    return set, sum
  end
  local found = depths(owners, n)
  local confirmed = found[3]
  local canon = canonical(n)
  local function speculated(i, within)
    local field = field_at(canon[i])
    local value = redis.call('HGET', spec_key(field), field) or ''
    local set, sum = {}, 0
    for at = 1, #value - 7, 8 do
      local slot, gen, expiry_s = struct.unpack('<HHI', value, at)
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
  local spec = depths(speculated, #canon)[1]
  for _, row in ipairs(rows) do
    local gpu, host, disk = found[3][row.slot] or 0, found[2][row.slot] or 0, found[1][row.slot] or 0
    row.hint = STRIDE_TOKENS * (gpu + 0.9 * (host - gpu) + 0.5 * (disk - host))
    row.hit = row.hint
    if spec[row.slot] then row.hit = math.max(row.hit, STRIDE_TOKENS * canon[spec[row.slot]]) end
  end
  return confirmed, canon, field_at
end

local function price(ask, row, total, count)
  local queued = row.queued_tokens + row.booked.pf + row.booked.old_pf
  if row.newness > 0 and count > 1 then
    local missing = (total - queued) / (count - 1) - queued
    if missing > 0 then queued = queued + row.newness * missing end
  end
  row.queued = queued
  row.uncached = ask.tokens - math.min(row.hit, ask.tokens - 1)
  local full = 0
  if row.kv_total > 0 then
    local empty = math.max(0, math.min(row.kv_free, row.kv_total) - row.kv_cached)
    full = 1 - empty / row.kv_total
  end
  row.use_rate = row.rate >= 1 and row.rate or usual_rate
  local work = queued + row.uncached * (1 + displacement * full)
  row.prefill_s = work / row.use_rate
  local a, b = usual_a, usual_b
  if row.tbt_a > 0 then a, b = row.tbt_a, row.tbt_b end
  local booked_res = row.booked.res + row.booked.old_res
  row.resident = row.resident_tokens + booked_res
  local waiting = row.waiting + row.booked.in_flight
  local tbt_us = a * (1 + 0.05 * waiting) + b * (row.resident + ask.need)
  row.tbt_s = tbt_us / 1e6
  row.fits = row.kv_total == 0 or row.kv_free * BLOCK_TOKENS - booked_res >= ask.need
end
local function shortlist(role, load)
  local kept = {}
  local function keep_first(better)
    local sorted = {}
    for i, row in ipairs(role) do sorted[i] = row end
    table.sort(sorted, better)
    for i = 1, math.min(SHORTLIST, #sorted) do kept[sorted[i].slot] = true end
  end
  keep_first(function(x, y)
    if x.hit ~= y.hit then return x.hit > y.hit end
    return x.slot < y.slot
  end)
  keep_first(function(x, y)
    if load(x) ~= load(y) then return load(x) < load(y) end
    return x.slot < y.slot
  end)
  local short = {}
  for _, row in ipairs(role) do
    if kept[row.slot] then short[#short + 1] = row end
  end
  return short
end
local function eligible(ask, excluded)
  local roles, count = {[true] = {}, [false] = {}}, 0
  for _, row in ipairs(rows) do
    if not excluded[row.slot] then
      local role = roles[row.is_prefill]
      role[#role + 1] = row
      count = count + 1
    end
  end
  for _, role in pairs(roles) do
    local total = 0
    for _, row in ipairs(role) do
      total = total + row.queued_tokens + row.booked.pf + row.booked.old_pf
    end
    for _, row in ipairs(role) do price(ask, row, total, #role) end
  end
  if count > MAX_ROWS then
    roles[true] = shortlist(roles[true], function(r) return r.queued / r.use_rate end)
    roles[false] = shortlist(roles[false], function(r) return r.tbt_s end)
  end
  return roles[true], roles[false]
end

local function link_s(ask, p_slot, d)
  local of_p = p_slot and pairs_s[p_slot]
  local token_s = of_p and of_p[d.slot] or link_token_s
  if token_s < 0 then return nil end
  return token_s * (ask.tokens - math.min(d.hint, ask.tokens))
end
local function option(ask, kind, row, handoff_s, decode_s, extra_s, fits, partner)
  local prefill_s = kind == DECODE and 0 or row.prefill_s
  return {kind = kind, row = row, slot = row.slot, fits = fits, partner = partner,
    cost_s = prefill_s + handoff_s + decode_s + extra_s, prefill_s = prefill_s,
    handoff_s = handoff_s, decode_s = decode_s, extra_s = extra_s}
end
local function cheaper(x, y)
  if x.fits ~= y.fits then return x.fits end
  if x.cost_s ~= y.cost_s then return x.cost_s < y.cost_s end
  if x.kind ~= y.kind then return x.kind < y.kind end
  return x.slot < y.slot
end
local function is_less(fits, s, slot, best)
  if fits ~= best.fits then return fits end
  if s ~= best.cost_s then return s < best.cost_s end
  return slot < best.slot
end
-- Where the KV of a prefill worker would best go.
local function best_partner(ask, p_slot, decode)
  local best
  for _, d in ipairs(decode) do
    local moving_s = link_s(ask, p_slot, d)
    if moving_s then
      local decode_s = ask.decode * d.tbt_s
      if not best or is_less(d.fits, moving_s + decode_s, d.slot, best) then
        best = {fits = d.fits, cost_s = moving_s + decode_s, slot = d.slot, link_s = moving_s,
          decode_s = decode_s}
      end
    end
  end
  return best
end
local function may_bypass(ask, d, can_remote)
  if ask.force == LOCAL or not can_remote then return true end
  if d.uncached > ask.bypass then return false end
  return ask.max_tbt_s == 0 or d.tbt_s <= ask.max_tbt_s
end
local function all_options(ask, prefill, decode)
  local options, can_remote = {}, false
  if ask.force == DECODE then
    for _, d in ipairs(decode) do
      local moving_s = d.slot ~= ask.source and link_s(ask, ask.source, d)
      if moving_s then
        options[#options + 1] = option(ask, DECODE, d, moving_s, ask.decode * d.tbt_s, 0, d.fits, -1)
      end
    end
    return options, false
  end
  local usual = #prefill > 0 and best_partner(ask, nil, decode) -- of all without a pair of their own
  for _, p in ipairs(prefill) do
    local best = usual
    if pairs_s[p.slot] then best = best_partner(ask, p.slot, decode) end
    if best then
      can_remote = true
      if ask.force == 0 or ask.force == REMOTE then
        options[#options + 1] = option(ask, REMOTE, p, fixed_s + best.link_s, best.decode_s, 0,
          best.fits, best.slot)
      end
    end
  end
  if ask.force == 0 or ask.force == LOCAL then
    for _, d in ipairs(decode) do
      if may_bypass(ask, d, can_remote) then
        local stall_s = stall * d.running * (d.uncached / d.use_rate)
        options[#options + 1] = option(ask, LOCAL, d, 0, ask.decode * d.tbt_s, stall_s, d.fits, -1)
      end
    end
  end
  if ask.force == 0 or ask.force == STAY then
    for _, p in ipairs(prefill) do
      local decode_s = ask.decode * p.tbt_s
      options[#options + 1] = option(ask, STAY, p, 0, decode_s, hold * decode_s, p.fits, -1)
    end
  end
  return options, can_remote
end
local function octave(o) return (select(2, math.frexp(o.row.queued))) end
local function among_ties(ask, options)
  local best, chosen = options[1], nil
  local scale = best.kind == DECODE and best.cost_s or best.prefill_s
  local limit = best.cost_s + math.max(tie_s, tie_ratio * scale)
  for _, o in ipairs(options) do
    if o.kind == best.kind and o.fits == best.fits and o.cost_s <= limit then
      o.rank = mix32(bit.bxor(ask.root, o.row.seed) % 4294967296)
      local c = chosen
      if not c then
        chosen = o
      elseif o.row.hit ~= c.row.hit then
        if o.row.hit > c.row.hit then chosen = o end
      elseif octave(o) ~= octave(c) then
        if octave(o) < octave(c) then chosen = o end
      elseif o.row.booked.in_flight ~= c.row.booked.in_flight then
        if o.row.booked.in_flight < c.row.booked.in_flight then chosen = o end
      elseif o.rank ~= c.rank then
        if o.rank > c.rank then chosen = o end
      elseif o.slot < c.slot then
        chosen = o
      end
    end
  end
  return chosen
end
local function pack_option(ask, o)
  local r = o.row
  return struct.pack('<HBBhHIdddddddddd', o.slot, o.kind, o.fits and 1 or 0, o.partner,
    r.booked.in_flight, o.rank or mix32(bit.bxor(ask.root, r.seed) % 4294967296), o.cost_s,
    o.prefill_s, o.handoff_s, o.decode_s, o.extra_s, r.queued, r.uncached, r.hit, r.hint,
    r.resident)
end

-- What an id held ends when the id is reserved again: a request that is begun anew counts once.
local function end_held(rid)
  local held = redis.call('GET', base .. 'r:' .. rid)
  if not held or #held ~= 16 then return end
  local slot, gen, epoch, pf, res = struct.unpack('<HHIII', held)
  local row, b = by_slot[slot], nil
  if row and row.gen == gen then
    b = row.booked
  else
    local packed = redis.call('HGET', base .. 'q', slot)
    if packed and #packed == 40 and packed:sub(1, 2) == held:sub(3, 4) then
      b = read_booked(packed, gen)
    end
  end
  local num_ended = redis.call('ZREM', base .. 'rz', held:sub(1, 4) .. rid)
  if not b then return end
  b.in_flight = math.max(0, b.in_flight - num_ended)
  if epoch == b.epoch then
    b.pf, b.res = math.max(0, b.pf - pf), math.max(0, b.res - res)
  elseif epoch == b.epoch - 1 then
    b.old_pf, b.old_res = math.max(0, b.old_pf - pf), math.max(0, b.old_res - res)
  end
  write_booked(slot, b)
end
local function reserve(ask, rid, o)
  end_held(rid)
  local row, b = o.row, o.row.booked
  local pf = o.kind == DECODE and 0 or math.ceil(row.uncached)
  local res = o.kind == REMOTE and 0 or ask.need
  local head = struct.pack('<HH', row.slot, row.gen)
  redis.call('SET', base .. 'r:' .. rid, head .. struct.pack('<III', b.epoch, pf, res), 'PX',
    reserve_ms)
  -- `r:` may have run out before the sweep got as far: then it is counted still, and not twice.
  local num_new = redis.call('ZADD', base .. 'rz', now + reserve_ms, head .. rid)
  b.in_flight = math.min(65535, b.in_flight + num_new)
  b.pf, b.res = math.min(4294967295, b.pf + pf), math.min(4294967295, b.res + res)
  b.newest = now
  write_booked(row.slot, b)
end
-- The chosen worker will hold this prompt once its prefill is over: let others know by then.
local function speculate(o, confirmed, canon, field_at)
  local row = o.row
  local done_ms = now + math.min(MAX_PREFILL_MS, math.ceil(o.prefill_s * 1000))
  local expiry_s = math.ceil((done_ms + spec_grace_ms) / 1000)
  for _, c in ipairs(canon) do
    if c > (confirmed[row.slot] or 0) then
      local field = field_at(c)
      local key = spec_key(field)
      local value, kept = redis.call('HGET', key, field) or '', {}
      local mine_s = expiry_s
      for at = 1, #value - 7, 8 do
        local slot, gen, until_s = struct.unpack('<HHI', value, at)
        if slot == row.slot and gen == row.gen then
          mine_s = math.max(mine_s, until_s)
        elseif until_s * 1000 > now and #kept < MAX_SPEC_OWNERS - 1 then
          kept[#kept + 1] = value:sub(at, at + 7)
        end
      end
      kept[#kept + 1] = struct.pack('<HHI', row.slot, row.gen, mine_s)
      if redis.call('HSET', key, field, table.concat(kept)) == 1 then
        if redis.call('HLEN', key) > SPEC_BUCKET_FIELDS then
          local all = redis.call('HGETALL', key)
          for j = 1, #all, 2 do
            local is_alive = false
            for at = 1, #all[j + 1] - 7, 8 do
              local _, _, until_s = struct.unpack('<HHI', all[j + 1], at)
              is_alive = is_alive or until_s * 1000 > now
            end
            if not is_alive then redis.call('HDEL', key, all[j]) end
          end
        end
        redis.call('PEXPIRE', key, SPEC_KEEP_MS)
      end
    end
  end
end

local answers = {}
for at = 9, #ARGV - 3, 4 do
  local rid, packed, excluded = ARGV[at], ARGV[at + 1], {}
  local ask = {}
  ask.tokens, ask.decode, ask.need, ask.bypass, ask.max_tbt_s, ask.root, ask.force, ask.source =
    struct.unpack('<dddddddd', ARGV[at + 2])
  for i = 1, #ARGV[at + 3] - 1, 2 do
    excluded[(struct.unpack('<H', ARGV[at + 3], i))] = true
  end
  local confirmed, canon, field_at = find_hits(packed)
  local prefill, decode = eligible(ask, excluded)
  local options, can_remote = all_options(ask, prefill, decode)
  if #options == 0 then
    answers[#answers + 1] = {'NONE'}
  else
    table.sort(options, cheaper)
    local chosen = among_ties(ask, options)
    local told = {pack_option(ask, chosen)}
    for _, o in ipairs(options) do
      if o ~= chosen and #told < MAX_OPTIONS then told[#told + 1] = pack_option(ask, o) end
    end
    if rid ~= '' then
      reserve(ask, rid, chosen)
      if chosen.kind ~= DECODE then speculate(chosen, confirmed, canon, field_at) end
    end
    answers[#answers + 1] = {'OK', chosen.row.gen, can_remote and 1 or 0, table.concat(told)}
  end
end
return answers
