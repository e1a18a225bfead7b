-- End reservations; withdraw hints that promised what a worker did not have.
-- KEYS w, wi, ver, wv, wn, sc   ARGV num_buckets, spec_buckets; then per reservation: its id and
-- the hashes (8 bytes each) its worker turned out not to hold
local buckets, spec_buckets = tonumber(ARGV[1]), tonumber(ARGV[2])
local base = KEYS[1]:sub(1, -2)
local function withdraw(key, field, mine, size)
  local value = redis.call('HGET', key, field)
  if not value then return end
  local kept = {}
  for at = 1, #value - size + 1, size do
    local slot, gen = struct.unpack('<HH', value, at)
    if struct.pack('<HH', slot % 16384, gen) ~= mine then
      kept[#kept + 1] = value:sub(at, at + size - 1)
    end
  end
  local left = table.concat(kept)
  if left == '' then
    redis.call('HDEL', key, field)
  elseif left ~= value then
    redis.call('HSET', key, field, left)
  end
end
local num_released = 0
for at = 3, #ARGV - 1, 2 do
  local rid, lies = ARGV[at], ARGV[at + 1]
  local held = redis.call('GET', base .. 'r:' .. rid)
  if held and #held == 16 then
    local slot, gen, epoch, pf, res = struct.unpack('<HHIII', held)
    local mine = held:sub(1, 4)
    redis.call('DEL', base .. 'r:' .. rid)
    redis.call('ZREM', base .. 'rz', mine .. rid)
    num_released = num_released + 1
    local packed = redis.call('HGET', base .. 'q', slot)
    if packed and #packed == 40 and packed:sub(1, 2) == held:sub(3, 4) then
      local _, in_flight, now_epoch, now_pf, now_res, old_pf, old_res, began, newest =
        struct.unpack('<HHIIIIIdd', packed)
      if epoch == now_epoch then
        now_pf, now_res = math.max(0, now_pf - pf), math.max(0, now_res - res)
      elseif epoch == now_epoch - 1 then
        old_pf, old_res = math.max(0, old_pf - pf), math.max(0, old_res - res)
      end
      redis.call('HSET', base .. 'q', slot, struct.pack('<HHIIIIIdd', gen,
        math.max(0, in_flight - 1), now_epoch, now_pf, now_res, old_pf, old_res, began, newest))
    end
    for i = 1, #lies - 7, 8 do
      local field = lies:sub(i, i + 7)
      local number = struct.unpack('<H', field)
      withdraw(base .. 'b:' .. (number % buckets), field, mine, 4)
      withdraw(base .. 's:' .. (number % spec_buckets), field, mine, 8)
    end
  end
end
return {'OK', num_released}
