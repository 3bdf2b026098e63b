-- Removes the unused units from each user's hash, so that they can be given back to the store.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache, 2 the milliseconds for which a hash must not have been used: other servers may use it
-- Reply   for each key {window, unused units}; when there are none {pending (see quota_install)}, or {} without these
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, key in ipairs(KEYS) do
  local hash = redis.pcall('HMGET', key, 'run', 'epoch', 'window', 'currentCount', 'reserved', 'at', 'pending',
    'pendingAt')
  replies[i] = {}
  if not hash.err and hash[1] == run and hash[2] == ARGV[1] and ms - (tonumber(hash[6]) or 0) >= tonumber(ARGV[2]) then
    local unused = hash[3] and tonumber(hash[5]) - tonumber(hash[4]) or 0
    if unused > 0 then
      redis.call('HSET', key, 'reserved', hash[4])
      replies[i] = {hash[3], unused}
    elseif (tonumber(hash[7]) or 0) > 0 and (tonumber(hash[8]) or 0) + 2000 >= ms then
      replies[i] = {tonumber(hash[7])}
    end
  end
end
return replies
