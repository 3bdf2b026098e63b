-- Removes the unused units from each user's hash, so that they can be given back to the store.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache
-- Reply   for each key {window, unused units}, or {} when there are none
local replies = {}
for i, key in ipairs(KEYS) do
  local hash = redis.call('HMGET', key, 'run', 'epoch', 'window', 'currentCount', 'reserved')
  replies[i] = {}
  if hash[1] == run and hash[2] == ARGV[1] and hash[3] then
    local unused = tonumber(hash[5]) - tonumber(hash[4])
    if unused > 0 then
      redis.call('HSET', key, 'reserved', hash[4])
      replies[i] = {hash[3], unused}
    end
  end
end
return replies
