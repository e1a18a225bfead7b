-- Extend a lease with a new load; after a slot changed hands, scrub some buckets of void hints.
-- KEYS w, wi, ver, wv, wn, sc   ARGV slot, gen, record, lease_ms, reclaim_ms, sweep_buckets,
-- num_buckets, settle_ms, turn_ms, now_ms ('' = the store's clock)
local now = tonumber(ARGV[10])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local reclaim = tonumber(ARGV[5])
local rec = redis.call('HGET', KEYS[1], ARGV[1])
if not rec or #rec ~= 64 or rec:byte(4) == 0
  or struct.unpack('<H', rec:sub(1, 2)) ~= tonumber(ARGV[2])
  or struct.unpack('<d', rec:sub(9, 16)) + reclaim < now then
  return {'GONE'}
end
redis.call('HSET', KEYS[1], ARGV[1], rec:sub(1, 2) .. ARGV[3]:sub(3, 8)
  .. struct.pack('<d', now + tonumber(ARGV[4])) .. ARGV[3]:sub(17, 44)
  .. rec:sub(45, 52) .. ARGV[3]:sub(53))

-- Work booked well before this report is in it: `q` counts it no longer (see route.lua).
local q = redis.call('HGET', KEYS[1]:sub(1, -2) .. 'q', ARGV[1])
if q and #q == 40 and q:sub(1, 2) == rec:sub(1, 2) then
  local gen_, in_flight, epoch, pf, res, _, _, began, newest = struct.unpack('<HHIIIIIdd', q)
  local settle_ms = tonumber(ARGV[8])
  -- Times that make no sense, such as a day to come, settle too.
  local is_all = not (math.abs(now - newest) < settle_ms)
  local is_old = not (math.abs(now - began) < settle_ms)
  if is_all or is_old then
    if is_all then pf, res = 0, 0 end
    redis.call('HSET', KEYS[1]:sub(1, -2) .. 'q', ARGV[1], struct.pack('<HHIIIIIdd', gen_, in_flight,
      epoch + (is_all and 2 or 1), 0, 0, pf, res, now, newest))
  end
end

local sweep = tonumber(ARGV[6])
if sweep == 0 then return {'OK'} end
-- One worker at a time is the janitor: whoever renews first when the last turn is over.
local turn_until = tonumber(redis.call('HGET', KEYS[6], 'turn') or 0)
if turn_until > now then return {'OK'} end
redis.call('HSET', KEYS[6], 'turn', now + tonumber(ARGV[9]))
local buckets = tonumber(ARGV[7])
local cursor = tonumber(redis.call('HGET', KEYS[6], 'cursor') or 0)
local sweep_until = tonumber(redis.call('HGET', KEYS[6], 'until') or 0)
local gens = {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local r, s = all[i + 1], tonumber(all[i])
  if s and #r == 64 and r:byte(4) ~= 0 then
    if struct.unpack('<d', r:sub(9, 16)) + reclaim < now then
      -- Silent for too long: the slot becomes a tombstone that keeps only its generation.
      redis.call('HSET', KEYS[1], all[i], r:sub(1, 3) .. '\0' .. r:sub(5))
      local info = redis.call('HGET', KEYS[2], all[i])
      if info then redis.call('HDEL', KEYS[5], cjson.decode(info)['worker_id']) end
      redis.call('HDEL', KEYS[2], all[i])
      redis.call('INCR', KEYS[4])
      sweep_until = cursor + buckets
    else
      gens[s] = struct.unpack('<H', r:sub(1, 2))
    end
  end
end
if cursor >= sweep_until then return {'OK'} end -- no slot changed hands since the last full sweep
local stop = math.min(cursor + sweep, sweep_until)
redis.call('HSET', KEYS[6], 'cursor', stop, 'until', sweep_until)
local prefix = KEYS[1]:sub(1, -2) .. 'b:'
for i = cursor, stop - 1 do
  local key = prefix .. (i % buckets)
  local fields = redis.call('HGETALL', key)
  for j = 1, #fields, 2 do
    local owners, kept = fields[j + 1], {}
    for at = 1, #owners - 3, 4 do
      local slot, gen = struct.unpack('<HH', owners:sub(at, at + 3))
      if gens[slot % 16384] == gen then kept[#kept + 1] = owners:sub(at, at + 3) end
    end
    local left = table.concat(kept)
    if left == '' then
      redis.call('HDEL', key, fields[j])
    elseif left ~= owners then
      redis.call('HSET', key, fields[j], left)
    end
  end
end
return {'OK'}
