-- Take a worker's report: renew its lease, change its hints, scrub hints that became void.
-- KEYS w, wi, ver, wv, wn, sc   ARGV slot, gen, record, lease_ms, reclaim_ms, settle_ms, num_buckets,
-- seq ('' = no hint changed), adds, rems (8 bytes a hash), tier (0 = GPU memory), max_owners,
-- spec_buckets, sweep_buckets (0 = none), turn_ms, now_ms ('' = the store's clock)
local now = tonumber(ARGV[16])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local slot, gen, record, seq = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[8])
local reclaim, buckets, sweep = tonumber(ARGV[5]), tonumber(ARGV[7]), tonumber(ARGV[14])
local base = KEYS[1]:sub(1, -2)
local function is_held(rec)
  return rec and #rec == 64 and rec:byte(4) ~= 0 and struct.unpack('<d', rec, 9) + reclaim >= now
end

local rec = redis.call('HGET', KEYS[1], slot)
if not is_held(rec) or struct.unpack('<H', rec) ~= gen then return {'GONE'} end
local last = struct.unpack('<d', rec, 45)
if seq and seq ~= last and seq ~= last + 1 then return {'RESYNC'} end
redis.call('HSET', KEYS[1], slot, rec:sub(1, 2) .. record:sub(3, 8)
  .. struct.pack('<d', now + tonumber(ARGV[4])) .. record:sub(17, 44)
  .. struct.pack('<d', seq or last) .. record:sub(53))

-- Work booked well before this report is in it: `q` counts it no longer (see route.lua).
local q = redis.call('HGET', base .. 'q', slot)
if q and #q == 40 and struct.unpack('<H', q) == gen then
  local _, in_flight, epoch, pf, res, _, _, began, newest = struct.unpack('<HHIIIIIdd', q)
  local settle_ms = tonumber(ARGV[6])
  -- Times that make no sense, such as a day to come, settle too.
  local is_all = not (math.abs(now - newest) < settle_ms)
  local is_old = not (math.abs(now - began) < settle_ms)
  if is_all or is_old then
    if is_all then pf, res = 0, 0 end
    redis.call('HSET', base .. 'q', slot, struct.pack('<HHIIIIIdd', gen, in_flight,
      epoch + (is_all and 2 or 1), 0, 0, pf, res, now, newest))
  end
end

local gens = {}
-- Owners whose slot has not changed hands, but for those of one slot.
local function others(owners, but)
  local kept = {}
  for at = 1, #owners - 3, 4 do
    local tagged, its_gen = struct.unpack('<HH', owners, at)
    local its_slot = tagged % 16384
    if its_slot ~= but and gens[its_slot] == its_gen then
      kept[#kept + 1] = owners:sub(at, at + 3)
    end
  end
  return kept
end
local function store(key, field, owners, left)
  if left == '' then
    if owners then redis.call('HDEL', key, field) end
  elseif left ~= owners then
    redis.call('HSET', key, field, left)
  end
end

local max_owners, spec_buckets = tonumber(ARGV[12]), tonumber(ARGV[13])
local own = struct.pack('<HH', slot, gen)
local mine = struct.pack('<HH', slot + 16384 * tonumber(ARGV[11]), gen)
-- What is confirmed, or gone, is not speculated about any more.
local function end_speculation(field)
  local key = base .. 's:' .. (struct.unpack('<H', field) % spec_buckets)
  local value = redis.call('HGET', key, field)
  if not value then return end
  local kept = {}
  for at = 1, #value - 7, 8 do
    if value:sub(at, at + 3) ~= own then kept[#kept + 1] = value:sub(at, at + 7) end
  end
  store(key, field, value, table.concat(kept))
end
local function edit(packed, is_add)
  for at = 1, #packed - 7, 8 do
    local field = packed:sub(at, at + 7)
    end_speculation(field)
    local key = base .. 'b:' .. (struct.unpack('<H', field) % buckets)
    local owners = redis.call('HGET', key, field)
    local kept = others(owners or '', slot)
    if is_add and #kept < max_owners then kept[#kept + 1] = mine end
    store(key, field, owners, table.concat(kept))
  end
end
if seq and seq ~= last then -- else none changed, or it is sent again because the answer was lost
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    local r, s = all[i + 1], tonumber(all[i])
    if s and is_held(r) then gens[s] = struct.unpack('<H', r) end
  end
  edit(ARGV[10], false)
  edit(ARGV[9], true)
end

-- One worker at a time is the janitor: whoever renews first when the last turn is over.
if sweep == 0 or tonumber(redis.call('HGET', KEYS[6], 'turn') or 0) > now then return {'OK'} end
redis.call('HSET', KEYS[6], 'turn', now + tonumber(ARGV[15]))
local cursor = tonumber(redis.call('HGET', KEYS[6], 'cursor') or 0)
local sweep_until = tonumber(redis.call('HGET', KEYS[6], 'until') or 0)
gens = {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local r, s = all[i + 1], tonumber(all[i])
  if s and is_held(r) then
    gens[s] = struct.unpack('<H', r)
  elseif s and #r == 64 and r:byte(4) ~= 0 then
    -- Silent for too long: the slot becomes a tombstone that keeps only its generation.
    redis.call('HSET', KEYS[1], all[i], r:sub(1, 3) .. '\0' .. r:sub(5))
    local info = redis.call('HGET', KEYS[2], all[i])
    if info then redis.call('HDEL', KEYS[5], cjson.decode(info)['worker_id']) end
    redis.call('HDEL', KEYS[2], all[i])
    redis.call('INCR', KEYS[4])
    sweep_until = cursor + buckets
  end
end
if cursor >= sweep_until then return {'OK'} end -- no slot changed hands since the last full sweep
local stop = math.min(cursor + sweep, sweep_until)
redis.call('HSET', KEYS[6], 'cursor', stop, 'until', sweep_until)
for i = cursor, stop - 1 do
  local key = base .. 'b:' .. (i % buckets)
  local fields = redis.call('HGETALL', key)
  for j = 1, #fields, 2 do
    store(key, fields[j], fields[j + 1], table.concat(others(fields[j + 1])))
  end
end
return {'OK'}
