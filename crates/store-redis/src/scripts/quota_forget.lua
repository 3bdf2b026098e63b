-- Deletes a user's hash because the user has new limits, or none.
-- KEYS    1 RateLimiterCache:<userId>
-- ARGV    1 run id of this Redis (its replication id is added here: it changes with every promotion)
-- Reply   {{window, unused places}}, or {{}} when there are none
local run = ARGV[1] .. string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
local hash = redis.pcall('HMGET', KEYS[1], 'run', 'window', 'currentCount', 'reserved')
redis.call('DEL', KEYS[1])
if not hash.err and hash[1] == run and hash[2] then
  return {{hash[2], tonumber(hash[4]) - tonumber(hash[3])}}
end
return {{}}
