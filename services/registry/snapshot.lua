-- Every worker record, and what does not change about each worker.
-- KEYS w, wi, ver, wv, wn, sc   ARGV known_info_version, now_ms ('' = the store's clock).
-- Infos are left out when the caller has this version of them.
local now = tonumber(ARGV[2])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local version = redis.call('GET', KEYS[4]) or '0'
local infos = {}
if version ~= ARGV[1] then infos = redis.call('HGETALL', KEYS[2]) end
return {now, version, redis.call('HGETALL', KEYS[1]), infos}
