-- Extend reservations whose requests still run. KEYS w, wi, ver, wv, wn, sc
-- ARGV reserve_ms, now_ms ('' = the store's clock); then reservation ids
local now = tonumber(ARGV[2])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local base = KEYS[1]:sub(1, -2)
for i = 3, #ARGV do
  local key = base .. 'r:' .. ARGV[i]
  local held = redis.call('GET', key)
  if held and #held == 16 then
    redis.call('PEXPIRE', key, ARGV[1])
    redis.call('ZADD', base .. 'rz', now + tonumber(ARGV[1]), held:sub(1, 4) .. ARGV[i])
  end
end
return {'OK'}
