-- Adds units that were reserved in the store to each user's hash, and spends some of them.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache, then for each key
--         nonce, start of the window (microseconds), reserved units, the store's count with them, limit, minutes, when to
--         expire (Redis's time in milliseconds), units to spend
-- Reply   for each key
--         {0}              refused: the hash was deleted, or is of a later window or of other limits; the units are unused
--         {1, spent, count, reserved, limit, minutes, window, milliseconds left, 0, pending, returns (see quota_returned)}
-- A missing hash is created only if its placeholder has the same nonce: new limits delete the placeholder, so units that
-- were reserved under the old limits are refused. Limits may change within a window: a hash that was created since has others.
-- `pending` are the other callers between their spend and their install: units that were reserved before a window was found full
-- may still arrive; and those that are giving units back to the store. What has not arrived for two seconds will not.
local epoch = ARGV[1]
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, key in ipairs(KEYS) do
  local at = 1 + (i - 1) * 8
  local nonce, window, units = ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local stored, limit, minutes = tonumber(ARGV[at + 4]), ARGV[at + 5], ARGV[at + 6]
  local expire_at, requested = ARGV[at + 7], tonumber(ARGV[at + 8])
  local hash = redis.call('HMGET', key, 'run', 'epoch', 'loading', 'window', 'currentCount', 'reserved', 'pending',
    'pendingAt', 'rateLimit', 'timeWindow', 'returns')
  local stored_window = hash[4]
  local count, reserved
  local returns = hash[11] or 0
  if hash[1] == run and hash[2] == epoch then
    if stored_window and stored_window == window then
      if hash[9] == limit and hash[10] == minutes then
        -- Unused units add up, in whatever order reservations arrive.
        local unused = tonumber(hash[6]) - tonumber(hash[5]) + units
        reserved = math.max(tonumber(hash[6]), stored)
        count = reserved - unused
      end
    elseif (stored_window and tonumber(stored_window) < tonumber(window)) or (not stored_window and hash[3] == nonce) then
      reserved = stored
      count = stored - units
      returns = 0
      redis.call('DEL', key)
    end
  end
  if not reserved then
    replies[i] = {0}
  else
    local spent = math.min(requested, reserved - count)
    count = count + spent
    local pending, pending_at = math.max(0, (tonumber(hash[7]) or 0) - 1), tonumber(hash[8]) or 0
    if pending_at + 2000 < ms then
      pending = 0
    end
    redis.call('HSET', key, 'rateLimit', limit, 'currentCount', count, 'reserved', reserved, 'timeWindow', minutes,
      'window', window, 'run', run, 'epoch', epoch, 'at', ms, 'pending', pending, 'pendingAt', pending_at)
    redis.call('PEXPIREAT', key, expire_at)
    local left = math.max(0, redis.call('PTTL', key))
    replies[i] = {1, spent, count, reserved, limit, minutes, window, left, 0, pending, returns}
  end
end
return replies
