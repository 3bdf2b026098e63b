-- Deletes each user's hash, because the user's limits were changed or removed.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    none
-- Reply   for each key {window, unused units}, or {} when there was no hash of this run
local replies = {}
for i, key in ipairs(KEYS) do
  local hash = redis.pcall('HMGET', key, 'run', 'window', 'currentCount', 'reserved')
  redis.call('DEL', key)
  replies[i] = {}
  if not hash.err and hash[1] == run and hash[2] then
    replies[i] = {hash[2], tonumber(hash[4]) - tonumber(hash[3])}
  end
end
return replies
