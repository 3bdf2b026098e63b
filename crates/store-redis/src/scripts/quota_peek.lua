-- Reads users' hashes.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache
-- Reply   for each key {window, count, reserved}, or {} without a hash of this run and epoch
local replies = {}
for i, key in ipairs(KEYS) do
  local hash = redis.call('HMGET', key, 'run', 'epoch', 'window', 'currentCount', 'reserved')
  replies[i] = {}
  if hash[1] == run and hash[2] == ARGV[1] and hash[3] then
    replies[i] = {hash[3], tonumber(hash[4]), tonumber(hash[5])}
  end
end
return replies
