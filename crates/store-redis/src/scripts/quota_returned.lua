-- Says that the store has back what quota_release has removed from each user's hash. Whoever has asked the store before that has
-- to ask again: `returns` tells by how often units were given back.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache, then for each key the start of the window (microseconds)
-- Reply   for each key 1, or 0 when its hash is gone
local replies = {}
for i, key in ipairs(KEYS) do
  local hash = redis.pcall('HMGET', key, 'run', 'epoch', 'window', 'pending')
  replies[i] = 0
  if not hash.err and hash[1] == run and hash[2] == ARGV[1] and hash[3] == ARGV[1 + i] then
    redis.call('HSET', key, 'pending', math.max(0, (tonumber(hash[4]) or 0) - 1))
    redis.call('HINCRBY', key, 'returns', 1)
    replies[i] = 1
  end
end
return replies
