-- Deletes each user's hash because the user has new limits, or none.
-- KEYS    RateLimiterCache:<userId> ...
-- Reply   for each key {window, unused places}, or {} when there are none
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
