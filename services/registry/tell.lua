-- Take a router's word about its requests; say what the autoscaler has for routers.
-- KEYS rt, as   ARGV router, word, life of a word in ms, most routers, now_ms ('' = the store's clock)
-- rt: router -> "at_ms word". as: see lead.lua. Answers now_ms, brief, until_ms.
local now = tonumber(ARGV[5])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
elseif redis.call('HGET', KEYS[1], ARGV[1]) or redis.call('HLEN', KEYS[1]) < tonumber(ARGV[4]) then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%d ', now) .. ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
local has = redis.call('HMGET', KEYS[2], 'brief', 'until')
return {now, has[1] or '', has[2] or '0'}
