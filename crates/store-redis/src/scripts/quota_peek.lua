-- Reads each user's hash.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache
-- Reply   for each key {window, count, reserved, pending (see quota_install), returns (see quota_returned)}, or {} without a hash
--         of this run and epoch
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, key in ipairs(KEYS) do
  local hash = redis.pcall('HMGET', key, 'run', 'epoch', 'window', 'currentCount', 'reserved', 'pending',
    'pendingAt', 'returns')
  replies[i] = {}
  if not hash.err and hash[1] == run and hash[2] == ARGV[1] and hash[3] then
    local pending = (tonumber(hash[7]) or 0) + 2000 < ms and 0 or tonumber(hash[6]) or 0
    replies[i] = {hash[3], tonumber(hash[4]), tonumber(hash[5]), pending, hash[8] or 0}
  end
end
return replies
