-- What a user's hash says.
-- KEYS    1 RateLimiterCache:<userId>
-- ARGV    1 run id of this Redis (its replication id is added here: it changes with every promotion), 2 epoch of the cache
-- Reply   {{window, count, reserved}}, or {{}} when it says nothing that can be used
local run = ARGV[1] .. string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
local hash = redis.call('HMGET', KEYS[1], 'run', 'epoch', 'window', 'currentCount', 'reserved')
if hash[1] == run and hash[2] == ARGV[2] and hash[3] then
  return {{hash[3], tonumber(hash[4]), tonumber(hash[5])}}
end
return {{}}
