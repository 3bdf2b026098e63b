-- Spends units that are reserved in each user's hash.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache, 2 a test's time in microseconds ('' = the key's TTL ends the window), 3 a nonce, then for each
--         key the number of units
-- Reply   for each key
--         {0, nonce, ms}   no hash: reserve in the store, then install under this nonce; ms is Redis's time
--         {1, spent, count, reserved, limit, minutes, window, milliseconds left, ms, 0, returns (see quota_returned)}
--         {2}              written under a later epoch: the caller is outdated
-- A caller that gets fewer units than requested goes to the store and installs what it gets there. Until then it is pending, so
-- that others who find the window full know that units may arrive (see quota_install).
local epoch, now, nonce = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, key in ipairs(KEYS) do
  -- A key of another type was not written by Weir. It is deleted below.
  local hash = redis.pcall('HMGET', key, 'run', 'epoch', 'loading', 'currentCount', 'reserved', 'rateLimit',
    'timeWindow', 'window', 'at', 'returns')
  if hash.err then
    hash = {}
  end
  local window = hash[8]
  local left = window and redis.call('PTTL', key) or 0
  if window and now ~= '' and tonumber(window) + hash[7] * 60000000 <= tonumber(now) then
    left = 0
  end
  -- Written in the future: Redis's clock was set back since, so the TTL does not end with the window.
  if (tonumber(hash[9]) or 0) > ms + 1000 then
    left = 0
  end
  if hash[1] == run and (tonumber(hash[2]) or 0) > epoch then
    replies[i] = {2}
  elseif hash[1] ~= run or (tonumber(hash[2]) or 0) < epoch or (window and left <= 0) or not (window or hash[3]) then
    -- Written by another run or epoch, or the window has ended. The placeholder gives a caller two seconds to install units.
    redis.call('DEL', key)
    redis.call('HSET', key, 'run', run, 'epoch', ARGV[1], 'loading', nonce, 'pending', 1, 'pendingAt', ms)
    redis.call('PEXPIRE', key, 2000)
    replies[i] = {0, nonce, ms}
  elseif not window then
    redis.call('HINCRBY', key, 'pending', 1)
    redis.call('HSET', key, 'pendingAt', ms)
    replies[i] = {0, hash[3], ms}
  else
    local count, reserved = tonumber(hash[4]), tonumber(hash[5])
    local requested = tonumber(ARGV[3 + i])
    local spent = math.min(requested, reserved - count)
    if spent > 0 then
      count = count + spent
      redis.call('HSET', key, 'currentCount', count, 'at', ms)
    end
    if spent < requested then
      redis.call('HINCRBY', key, 'pending', 1)
      redis.call('HSET', key, 'pendingAt', ms)
    end
    replies[i] = {1, spent, count, reserved, hash[6], hash[7], window, left, ms, 0, hash[10] or 0}
  end
end
return replies
