-- Counts attempts that no purchase decides: on a cluster, and requests of an address.
-- KEYS    sale:{_user}:<limit>:<user> or sale:{_address}:<limit>:<burst>:<address>, on a cluster with all behind `_` in the hash tag
-- ARGV    1 now in microseconds ('' = Redis's time), then for each key its limit and its burst (0 = a user)
-- Reply   for each key 0, or the milliseconds to wait if the attempt is one too many
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * SECOND + time[2]
end
local replies = {}
for i, key in ipairs(KEYS) do
  local limit, burst = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  replies[i] = burst == 0 and count_user(key, limit, now) or count_address(key, limit, burst, now)
end
return replies
