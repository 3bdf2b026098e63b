-- Loads a sale from the store into Redis, page by page, or updates it. Purchases that Redis has already stay as they are. The
-- call with the last page opens the sale.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    for each key product id, sku, name, units, start, end, created, state, end reason, 1 for the last page (else 0), the
--         number of purchases, and for each of these user, number, time. The end of a sale that has begun never moves back: it may have been
--         extended here
-- Events  published on sale:events when a sale is opened: {event = 'product-change', data = {sku}}
-- Reply   for each key 1, or 0 if Redis has a newer product of this sku
local rank = {UPCOMING = 1, ACTIVE = 2, ENDED = 3}
local replies, place = {}, 0
for i, key in ipairs(KEYS) do
  local function arg(n) return ARGV[place + n] end
  local count = tonumber(arg(11))
  local id = redis.call('HGET', key .. ':config', 'id')
  if id and tonumber(id) > tonumber(arg(1)) then
    replies[i] = 0
  else
    if id and id ~= arg(1) then
      redis.call('DEL', key .. ':config', key .. ':state', key .. ':end_reason', key .. ':stock', key .. ':seq', key .. ':buyers',
        key .. ':stream')
    end
    redis.call('HSET', key .. ':config', 'id', arg(1))
    local seq = tonumber(redis.call('GET', key .. ':seq') or 0)
    for n = 1, count do
      local at = 11 + (n - 1) * 3
      redis.call('HSETNX', key .. ':buyers', arg(at + 1), arg(at + 2) .. ':' .. arg(at + 3))
      seq = math.max(seq, tonumber(arg(at + 2)))
    end
    local sold = redis.call('HLEN', key .. ':buyers')
    redis.call('SET', key .. ':seq', math.max(seq, sold))
    if arg(10) == '1' then
      local stock = math.max(tonumber(arg(4)) - sold, 0)
      local state, reason = redis.call('GET', key .. ':state'), redis.call('GET', key .. ':end_reason')
      local ends_at, before = arg(6), redis.call('HGET', key .. ':config', 'endTime')
      if before and state and state ~= 'UPCOMING' and tonumber(before) > tonumber(ends_at) then
        ends_at = before
      end
      if not state or rank[arg(8)] > rank[state] then
        state, reason = arg(8), arg(9)
      end
      if state ~= 'ENDED' and stock == 0 then
        state, reason = 'ENDED', 'SOLD_OUT'
      end
      redis.call('SET', key .. ':stock', stock)
      redis.call('SET', key .. ':state', state)
      if state == 'ENDED' and reason == 'ENDED_BY_OPERATOR' then
        reason = 'TIME_EXPIRED'
        redis.call('HSET', key .. ':config', 'endedBy', 'operator')
      end
      if state == 'ENDED' then
        redis.call('SET', key .. ':end_reason', reason)
      end
      redis.call('HSET', key .. ':config', 'sku', arg(2), 'productName', arg(3), 'initialStock', arg(4), 'startTime', arg(5),
        'endTime', ends_at, 'createdAt', arg(7), 'run', run)
      redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'product-change', data = {sku = arg(2)}}))
    end
    replies[i] = 1
  end
  place = place + 11 + count * 3
end
return replies
