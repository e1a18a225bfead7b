-- Take what one router has spent out of tenants' budgets; say what all routers have left.
-- KEYS one hash a tenant   ARGV router, life of a router's word in ms, how long after it what it has
-- told is known, life of an idle key in ms, then per tenant: the life in which it counts, requests
-- and tokens spent in it, what of each it knows to have told, streams, request rate a second,
-- request burst, token rate a second, token burst; last now_ms ('' = the store's clock).
-- A hash holds r and t (levels), at (ms), and s:ROUTER = "streams deadline_ms life requests tokens".
-- Totals and not differences: a call that came although its answer was lost is not counted again.
local now = tonumber(ARGV[#ARGV])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local router, word_ms, keep_ms, idle_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local answers = {}
for i = 1, #KEYS do
  local key, a = KEYS[i], 4 + (i - 1) * 10
  local kept, others, routers = {}, 0, 1
  local life, requests, tokens = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3]
  local told_r, told_t = tonumber(ARGV[a + 4]), tonumber(ARGV[a + 5])
  local all = redis.call('HGETALL', key)
  for j = 1, #all, 2 do
    local name = all[j]
    if name:sub(1, 2) == 's:' then
      local streams, deadline, known, known_r, known_t =
        all[j + 1]:match('^(%d+) (%d+) ?(%S*) ?(%S*) ?(%S*)$')
      if not deadline or tonumber(deadline) + keep_ms < now then
        redis.call('HDEL', key, name)
      elseif name:sub(3) == router then
        if known == life and tonumber(known_r) and tonumber(known_t) then
          told_r, told_t = tonumber(known_r), tonumber(known_t)
        end
      elseif tonumber(deadline) >= now then
        others = others + tonumber(streams)
        routers = routers + 1
      end
    else
      kept[name] = tonumber(all[j + 1])
    end
  end
  local passed = math.max(0, now - (kept.at or now)) / 1000
  local r = math.min(tonumber(ARGV[a + 8]), (kept.r or tonumber(ARGV[a + 8])) + passed * tonumber(ARGV[a + 7]))
  local t = math.min(tonumber(ARGV[a + 10]), (kept.t or tonumber(ARGV[a + 10])) + passed * tonumber(ARGV[a + 9]))
  r, t = r - (tonumber(requests) - told_r), t - (tonumber(tokens) - told_t)
  redis.call('HSET', key, 'r', string.format('%.17g', r), 't', string.format('%.17g', t),
    'at', math.max(now, kept.at or 0), 's:' .. router,
    table.concat({ARGV[a + 6], now + word_ms, life, requests, tokens}, ' '))
  redis.call('PEXPIRE', key, idle_ms)
  answers[i] = string.format('%.17g %.17g %d %d', r, t, others, routers)
end
return answers
