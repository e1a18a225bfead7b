-- Take what one router has spent out of tenants' budgets; say what all routers have left.
-- KEYS one hash a tenant   ARGV router, life of a router's word in ms, life of an idle key in ms,
-- then per tenant: requests, tokens, streams, request rate a second, request burst, token rate a
-- second, token burst; last now_ms ('' = the store's clock).
-- A hash holds r and t (levels), at (ms), and s:ROUTER = "streams deadline_ms".
local now = tonumber(ARGV[#ARGV])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local router, word_ms, idle_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local answers = {}
for i = 1, #KEYS do
  local key, a = KEYS[i], 3 + (i - 1) * 7
  local kept, others, routers = {}, 0, 1
  local all = redis.call('HGETALL', key)
  for j = 1, #all, 2 do
    local name = all[j]
    if name:sub(1, 2) == 's:' then
      local streams, deadline = all[j + 1]:match('^(%d+) (%d+)$')
      if not deadline or tonumber(deadline) < now then
        redis.call('HDEL', key, name)
      elseif name:sub(3) ~= router then
        others = others + tonumber(streams)
        routers = routers + 1
      end
    else
      kept[name] = tonumber(all[j + 1])
    end
  end
  local passed = math.max(0, now - (kept.at or now)) / 1000
  local r = math.min(tonumber(ARGV[a + 5]), (kept.r or tonumber(ARGV[a + 5])) + passed * tonumber(ARGV[a + 4]))
  local t = math.min(tonumber(ARGV[a + 7]), (kept.t or tonumber(ARGV[a + 7])) + passed * tonumber(ARGV[a + 6]))
  r, t = r - tonumber(ARGV[a + 1]), t - tonumber(ARGV[a + 2])
  redis.call('HSET', key, 'r', string.format('%.17g', r), 't', string.format('%.17g', t),
    'at', math.max(now, kept.at or 0), 's:' .. router, ARGV[a + 3] .. ' ' .. (now + word_ms))
  redis.call('PEXPIRE', key, idle_ms)
  answers[i] = string.format('%.17g %.17g %d %d', r, t, others, routers)
end
return answers
