-- Allot a slot to a worker and raise its slot_gen, which voids every hint of the slot's past.
-- KEYS w, wi, ver, wv, wn, sc   ARGV schema, worker_id, incarnation, info_json, record,
-- proposed_gen, is_rejoin, lease_ms, reclaim_ms, max_slots, num_buckets, now_ms ('' = the
-- store's clock)
local now = tonumber(ARGV[12])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local ver = redis.call('GET', KEYS[3])
if ver and ver ~= ARGV[1] then return {'VERSION', ver} end
if not ver then redis.call('SET', KEYS[3], ARGV[1]) end

local function deadline_of(rec) return struct.unpack('<d', rec:sub(9, 16)) end
local function is_gone(rec)
  return #rec ~= 64 or rec:byte(4) == 0 or deadline_of(rec) + tonumber(ARGV[9]) < now
end

local named = redis.call('HGET', KEYS[5], ARGV[2])
local slot, old
if named then
  slot = tonumber(named)
  old = redis.call('HGET', KEYS[1], named)
  local info = redis.call('HGET', KEYS[2], named)
  if ARGV[7] == '1' and info and old and #old == 64 and deadline_of(old) > now then
    -- A later life of this worker holds the name: an earlier one may not take it back.
    if cjson.decode(info)['incarnation'] ~= ARGV[3] then return {'SUPERSEDED'} end
  end
else
  for candidate = 0, tonumber(ARGV[10]) - 1 do
    local rec = redis.call('HGET', KEYS[1], candidate)
    if not rec or is_gone(rec) then
      slot, old = candidate, rec
      break
    end
  end
  if not slot then return {'FULL'} end
  local info = redis.call('HGET', KEYS[2], slot)
  if info then redis.call('HDEL', KEYS[5], cjson.decode(info)['worker_id']) end
end

local gen = tonumber(ARGV[6])
if old and #old == 64 then
  gen = struct.unpack('<H', old:sub(1, 2))
  -- Hints of the old generation are void from now on: have them swept.
  local cursor = tonumber(redis.call('HGET', KEYS[6], 'cursor') or 0)
  redis.call('HSET', KEYS[6], 'until', cursor + tonumber(ARGV[11]))
end
gen = gen % 65535 + 1
local rec = struct.pack('<H', gen) .. ARGV[5]:sub(3, 8)
  .. struct.pack('<d', now + tonumber(ARGV[8])) .. ARGV[5]:sub(17, 44)
  .. struct.pack('<d', 0) .. ARGV[5]:sub(53)
redis.call('HSET', KEYS[1], slot, rec)
redis.call('HSET', KEYS[2], slot, ARGV[4])
redis.call('HSET', KEYS[5], ARGV[2], slot)
-- Counted from the time, not from nothing: in a store that restarted empty as many joins must not
-- reach a version that a reader knows from before, with other workers in the slots.
redis.call('SET', KEYS[4], string.format('%.0f', now), 'NX')
redis.call('INCR', KEYS[4])
return {'OK', slot, gen}
