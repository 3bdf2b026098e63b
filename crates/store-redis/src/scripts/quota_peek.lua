-- Reads a user's hash.
-- KEYS    1 RateLimiterCache:<userId>
-- ARGV    1 epoch of the cache
-- Reply   {{window, count, reserved}}, or {{}} without a hash of this run and epoch
local hash = redis.call('HMGET', KEYS[1], 'run', 'epoch', 'window', 'currentCount', 'reserved')
if hash[1] == run and hash[2] == ARGV[1] and hash[3] then
  return {{hash[3], tonumber(hash[4]), tonumber(hash[5])}}
end
return {{}}
