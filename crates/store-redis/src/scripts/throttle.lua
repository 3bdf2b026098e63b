-- Prepended to the scripts that count attempts. Defines `count_user` and `count_address`, which return 0, or the milliseconds to
-- wait if the attempt is one too many: then it does not count. Takes no KEYS or ARGV and returns nothing.
-- A key expires when nothing in it counts any more; a little later where `now` may be a clock that a test holds still.
-- What lies further in the future than it can is from before the clock was set back, and does not count.
local SECOND, SPARE_MS = 1000000, 5000

-- A sliding window: at most `limit` attempts in any second.
local function count_user(key, limit, now)
  if limit == 1 then
    -- One command for the usual limit: the key is the attempt.
    if redis.call('SET', key, '', 'PX', 1000, 'NX') then return 0 end
    local rest = redis.call('PTTL', key)
    if rest >= 0 and rest <= 1000 then return math.max(rest, 1) end
    redis.call('SET', key, '', 'PX', 1000)
    return 0
  end
  local newest, oldest = redis.call('LINDEX', key, 0), redis.call('LINDEX', key, limit - 1)
  if newest and tonumber(newest) > now then
    redis.call('DEL', key)
  elseif oldest and now - tonumber(oldest) < SECOND then
    return math.ceil((SECOND - now + tonumber(oldest)) / 1000)
  end
  redis.call('LPUSH', key, string.format('%.0f', now))
  redis.call('LTRIM', key, 0, limit - 1)
  redis.call('PEXPIRE', key, 1000 + SPARE_MS)
  return 0
end

-- A token bucket of `limit` a second and `burst` at once, as the time at which it is full again.
local function count_address(key, limit, burst, now)
  local interval = SECOND / limit
  local full_at = tonumber(redis.call('GET', key) or now)
  if full_at < now or full_at > now + burst * interval + 1 then full_at = now end
  local wait = full_at + interval - burst * interval - now
  -- Times are rounded to microseconds.
  if wait >= 1 then return math.ceil(wait / 1000) end
  full_at = full_at + interval
  redis.call('SET', key, string.format('%.0f', full_at), 'PX', math.ceil((full_at - now) / 1000) + SPARE_MS)
  return 0
end

