-- Removes the unused units from each user's hash, so that they can be given back to the store. Until quota_returned says that they
-- are, the caller is pending: neither Redis nor the store can hand them out, and nobody must take the window for full.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache, 2 the milliseconds for which a hash must not have been used: other servers may use it
-- Reply   for each key {window, removed units, other pending callers (see quota_install), returns (see quota_returned)}, or {}
--         without a hash of this run and epoch that was not used for so long
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, key in ipairs(KEYS) do
  local hash = redis.pcall('HMGET', key, 'run', 'epoch', 'window', 'currentCount', 'reserved', 'at', 'pending',
    'pendingAt', 'returns')
  replies[i] = {}
  if not hash.err and hash[1] == run and hash[2] == ARGV[1] and ms - (tonumber(hash[6]) or 0) >= tonumber(ARGV[2]) then
    local unused = hash[3] and tonumber(hash[5]) - tonumber(hash[4]) or 0
    local pending = (tonumber(hash[8]) or 0) + 2000 < ms and 0 or tonumber(hash[7]) or 0
    if unused > 0 then
      redis.call('HSET', key, 'reserved', hash[4], 'pending', pending + 1, 'pendingAt', ms)
    end
    replies[i] = {hash[3] or 0, unused, pending, hash[9] or 0}
  end
end
return replies
