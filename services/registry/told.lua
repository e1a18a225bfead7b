-- Every router's last word. KEYS rt   ARGV life of a word in ms, now_ms ('' = the store's clock)
-- Those that said nothing for that long are dropped. Answers now_ms, router, "at_ms word", ...
local now = tonumber(ARGV[2])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local answer, all = {now}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local at = tonumber(all[i + 1]:match('^(%d+) '))
  if at and at + tonumber(ARGV[1]) >= now then
    answer[#answer + 1] = all[i]
    answer[#answer + 1] = all[i + 1]
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return answer
