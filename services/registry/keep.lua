-- Write what the owner of the autoscaler's lease keeps, if it is still the owner. KEYS as
-- ARGV owner, token, now_ms ('' = the store's clock), then names and values. Answers OK | FENCED.
local now = tonumber(ARGV[3])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local has = redis.call('HMGET', KEYS[1], 'owner', 'token', 'until')
if has[1] ~= ARGV[1] or has[2] ~= ARGV[2] or (tonumber(has[3] or '0') or 0) < now then
  return {'FENCED'}
end
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return {'OK'}
