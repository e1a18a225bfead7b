-- Every worker record, and how many leading strides of a prompt each worker holds.
-- KEYS w, wi, ver, wv, wn, sc   ARGV hashes (8 bytes a stride), known_info_version, num_buckets,
-- now_ms ('' = the store's clock). Infos are left out when the caller has this version of them.
local now = tonumber(ARGV[4])
if not now then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local version = redis.call('GET', KEYS[4]) or '0'
local records = redis.call('HGETALL', KEYS[1])
local infos = {}
if version ~= ARGV[2] then infos = redis.call('HGETALL', KEYS[2]) end

local gens = {}
for i = 1, #records, 2 do
  local r = records[i + 1]
  local slot = tonumber(records[i])
  if slot and #r == 64 and r:byte(4) ~= 0 then
    gens[slot] = struct.unpack('<H', r:sub(1, 2))
  end
end
local packed, buckets = ARGV[1], tonumber(ARGV[3])
local prefix = KEYS[1]:sub(1, -2) .. 'b:'
-- Owners of one stride among `within` (nil = all), as a set and its size.
local function owners_at(i, within)
  local field = packed:sub(i * 8 - 7, i * 8)
  local owners = redis.call('HGET', prefix .. (struct.unpack('<H', field) % buckets), field) or ''
  local set, size = {}, 0
  for at = 1, #owners - 3, 4 do
    local slot, gen = struct.unpack('<HH', owners:sub(at, at + 3))
    slot = slot % 16384
    if gens[slot] == gen and not set[slot] and (not within or within[slot]) then
      set[slot] = true
      size = size + 1
    end
  end
  return set, size
end
local depth = {}
-- Caches are prefix-closed, so owner sets only shrink with depth: look only where they differ.
local function bisect(lo, hi, at_lo, size_lo, at_hi, size_hi)
  if size_lo == size_hi then return end
  if hi - lo == 1 then
    for slot in pairs(at_lo) do
      if not at_hi[slot] then depth[slot] = lo end
    end
    return
  end
  local mid = math.floor((lo + hi) / 2)
  local at_mid, size_mid = owners_at(mid, at_lo)
  bisect(lo, mid, at_lo, size_lo, at_mid, size_mid)
  local still, size_still = {}, 0
  for slot in pairs(at_hi) do
    if at_mid[slot] then
      still[slot] = true
      size_still = size_still + 1
    end
  end
  bisect(mid, hi, at_mid, size_mid, still, size_still)
end
local n = math.floor(#packed / 8)
if n > 0 then
  local first, size_first = owners_at(1, nil)
  for slot in pairs(first) do depth[slot] = n end
  if n > 1 and size_first > 0 then
    local last, size_last = owners_at(n, first)
    bisect(1, n, first, size_first, last, size_last)
  end
end
local flat = {}
for slot, strides in pairs(depth) do
  flat[#flat + 1] = slot
  flat[#flat + 1] = strides
end
return {now, version, records, infos, flat}
