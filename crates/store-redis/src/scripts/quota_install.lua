-- Adds places that were reserved in the store to each user's hash, and takes some of them.
-- KEYS    RateLimiterCache:<userId> ...
-- ARGV    1 epoch of the cache, then for each key
--         nonce, window, places, the store's count with them, limit, minutes, when to expire (Redis time in
--         milliseconds), places to take
-- Reply   for each key
--         {0}              refused: the hash was deleted, or is of a later window; the places are unused
--         {1, taken, count, reserved, limit, minutes, window, milliseconds left, 0}
-- A hash that is not there is made only under the nonce that was left in its place: after a DEL by new limits, places
-- that were reserved under the old ones find nothing and are refused.
local epoch = ARGV[1]
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, key in ipairs(KEYS) do
  local at = 1 + (i - 1) * 8
  local nonce, window, places = ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local stored, limit, minutes = tonumber(ARGV[at + 4]), ARGV[at + 5], ARGV[at + 6]
  local expire_at, wanted = ARGV[at + 7], tonumber(ARGV[at + 8])
  local hash = redis.call('HMGET', key, 'run', 'epoch', 'loading', 'window', 'currentCount', 'reserved')
  local held = hash[4]
  local count, reserved
  if hash[1] == run and hash[2] == epoch then
    if held and held == window then
      -- Unused places add up, whatever order reservations arrive in.
      local unused = tonumber(hash[6]) - tonumber(hash[5]) + places
      reserved = math.max(tonumber(hash[6]), stored)
      count = reserved - unused
    elseif (held and tonumber(held) < tonumber(window)) or (not held and hash[3] == nonce) then
      reserved = stored
      count = stored - places
      redis.call('DEL', key)
    end
  end
  if not reserved then
    replies[i] = {0}
  else
    local taken = math.min(wanted, reserved - count)
    count = count + taken
    redis.call('HSET', key, 'rateLimit', limit, 'currentCount', count, 'reserved', reserved, 'timeWindow', minutes,
      'window', window, 'run', run, 'epoch', epoch, 'at', ms)
    redis.call('PEXPIREAT', key, expire_at)
    local left = math.max(0, redis.call('PTTL', key))
    replies[i] = {1, taken, count, reserved, limit, minutes, window, left, 0}
  end
end
return replies
