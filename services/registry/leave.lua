-- Give a slot back. A tombstone keeps its generation, so that old hints stay void.
-- KEYS w, wi, ver, wv, wn, sc   ARGV slot, gen, num_buckets
local rec = redis.call('HGET', KEYS[1], ARGV[1])
if not rec or #rec ~= 64 or rec:byte(4) == 0
  or struct.unpack('<H', rec:sub(1, 2)) ~= tonumber(ARGV[2]) then
  return {'GONE'}
end
redis.call('HSET', KEYS[1], ARGV[1], rec:sub(1, 3) .. '\0' .. rec:sub(5))
local info = redis.call('HGET', KEYS[2], ARGV[1])
if info then redis.call('HDEL', KEYS[5], cjson.decode(info)['worker_id']) end
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('INCR', KEYS[4])
local cursor = tonumber(redis.call('HGET', KEYS[6], 'cursor') or 0)
redis.call('HSET', KEYS[6], 'until', cursor + tonumber(ARGV[3]))
return {'OK'}
