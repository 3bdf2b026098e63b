-- Deletes a user's hash because the user has new limits, or none.
-- KEYS    1 RateLimiterCache:<userId>
-- ARGV    1 run id of this Redis
-- Reply   {{window, unused places}}, or {{}} when there are none
local hash = redis.call('HMGET', KEYS[1], 'run', 'window', 'currentCount', 'reserved')
redis.call('DEL', KEYS[1])
if hash[1] == ARGV[1] and hash[2] then
  return {{hash[2], tonumber(hash[4]) - tonumber(hash[3])}}
end
return {{}}
