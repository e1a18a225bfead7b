-- Add and remove hints of one worker, and renew its lease.
-- KEYS w, wi, ver, wv, wn, sc   ARGV slot, gen, seq, adds, rems (8 bytes a hash), record,
-- lease_ms, reclaim_ms, num_buckets, max_owners, settle_ms, spec_buckets, tier (0 = GPU memory),
-- now_ms ('' = the store's clock)
local now = tonumber(ARGV[14])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local reclaim = tonumber(ARGV[8])
local slot, gen = tonumber(ARGV[1]), tonumber(ARGV[2])
local gens = {}
local all = redis.call('HGETALL', KEYS[1])
local rec
for i = 1, #all, 2 do
  local r, s = all[i + 1], tonumber(all[i])
  if s and #r == 64 and r:byte(4) ~= 0 and struct.unpack('<d', r:sub(9, 16)) + reclaim >= now then
    gens[s] = struct.unpack('<H', r:sub(1, 2))
    if s == slot then rec = r end
  end
end
if not rec or gens[slot] ~= gen then return {'GONE'} end
local seq = tonumber(ARGV[3])
local last = struct.unpack('<d', rec:sub(45, 52))
if seq ~= last and seq ~= last + 1 then return {'RESYNC'} end
redis.call('HSET', KEYS[1], slot, rec:sub(1, 2) .. ARGV[6]:sub(3, 8)
  .. struct.pack('<d', now + tonumber(ARGV[7])) .. ARGV[6]:sub(17, 44)
  .. struct.pack('<d', seq) .. ARGV[6]:sub(53))

-- Work booked well before this report is in it: `q` counts it no longer (see route.lua).
local q = redis.call('HGET', KEYS[1]:sub(1, -2) .. 'q', slot)
if q and #q == 40 and q:sub(1, 2) == rec:sub(1, 2) then
  local gen_, in_flight, epoch, pf, res, _, _, began, newest = struct.unpack('<HHIIIIIdd', q)
  local settle_ms = tonumber(ARGV[11])
  -- Times that make no sense, such as a day to come, settle too.
  local is_all = not (math.abs(now - newest) < settle_ms)
  local is_old = not (math.abs(now - began) < settle_ms)
  if is_all or is_old then
    if is_all then pf, res = 0, 0 end
    redis.call('HSET', KEYS[1]:sub(1, -2) .. 'q', slot, struct.pack('<HHIIIIIdd', gen_, in_flight,
      epoch + (is_all and 2 or 1), 0, 0, pf, res, now, newest))
  end
end
if seq == last then return {'OK'} end -- sent again because the answer was lost

local buckets, max_owners = tonumber(ARGV[9]), tonumber(ARGV[10])
local prefix = KEYS[1]:sub(1, -2) .. 'b:'
local spec_buckets = tonumber(ARGV[12])
local own = struct.pack('<HH', slot, gen)
local mine = struct.pack('<HH', slot + 16384 * tonumber(ARGV[13]), gen)
local function others(owners)
  local kept = {}
  for at = 1, #owners - 3, 4 do
    local s, g = struct.unpack('<HH', owners:sub(at, at + 3))
    if s % 16384 ~= slot and gens[s % 16384] == g then kept[#kept + 1] = owners:sub(at, at + 3) end
  end
  return kept
end
-- What is confirmed, or gone, is not speculated about any more.
local function end_speculation(field)
  local key = KEYS[1]:sub(1, -2) .. 's:' .. (struct.unpack('<H', field) % spec_buckets)
  local value = redis.call('HGET', key, field)
  if not value then return end
  local kept = {}
  for at = 1, #value - 7, 8 do
    if value:sub(at, at + 3) ~= own then kept[#kept + 1] = value:sub(at, at + 7) end
  end
  if #kept == 0 then
    redis.call('HDEL', key, field)
  elseif #kept * 8 < #value then
    redis.call('HSET', key, field, table.concat(kept))
  end
end
local function edit(packed, is_add)
  for at = 1, #packed - 7, 8 do
    local field = packed:sub(at, at + 7)
    end_speculation(field)
    local key = prefix .. (struct.unpack('<H', field) % buckets)
    local owners = redis.call('HGET', key, field)
    local kept = others(owners or '')
    if is_add and #kept < max_owners then kept[#kept + 1] = mine end
    local left = table.concat(kept)
    if left == '' then
      if owners then redis.call('HDEL', key, field) end
    elseif left ~= owners then
      redis.call('HSET', key, field, left)
    end
  end
end
edit(ARGV[5], false)
edit(ARGV[4], true)
return {'OK'}
