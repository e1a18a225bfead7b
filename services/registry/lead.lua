-- Take or keep the lease of the autoscaler. KEYS as
-- ARGV owner, lease_ms (0 = give it back), least token, now_ms ('' = the store's clock)
-- as: owner, token, until, and what the owner keeps: state, status, brief. The token grows whenever
-- the owner changes; an owner that lost a store that was restarted empty brings the one it knew.
-- Answers 1 token state | 0 owner left_ms; state is left out for who had the lease already.
local now = tonumber(ARGV[4])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local has = redis.call('HMGET', KEYS[1], 'owner', 'token', 'until', 'state')
local token, deadline = tonumber(has[2] or '0') or 0, tonumber(has[3] or '0') or 0
local is_ours = has[1] == ARGV[1]
if deadline >= now and not is_ours then
  return {0, has[1] or '', math.floor(deadline - now)}
end
local lease_ms = tonumber(ARGV[2])
if lease_ms == 0 then
  if is_ours then redis.call('HSET', KEYS[1], 'until', '0') end
  return {0, '', 0}
end
local state = ''
-- Also one's own lease that ran out: what was begun under it may still be under way.
if not is_ours or deadline < now then
  token = math.max(token, tonumber(ARGV[3])) + 1
  state = has[4] or ''
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'token', string.format('%d', token),
  'until', string.format('%d', now + lease_ms))
return {1, token, state}
