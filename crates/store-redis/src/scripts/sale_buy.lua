-- Sells one unit to each buyer, or returns why not, by the rule of weir_core::sale.
-- KEYS    sale:{<sku>} ..., the prefix of all keys of a sale, whose hash tag puts them into one hash slot:
--         :config, :state, :end_reason, :stock, :seq, :buyers (user -> number:time), :stream
--         Undeclared, so on one Redis only: the keys of throttle.lua, see sale_attempt.lua
-- ARGV    1 now in microseconds ('' = Redis's time), then for each key the number of buyers, and for each of them the buyer, its
--         attempts in a second (0 = not counted here), and <limit>:<burst>:<address> ('' = not counted here)
-- Events  published on sale:events for purchases and changes of state: {event, product, data}, data as in the API's events
-- Reply   for each key
--         {0}             no sale of this run: rebuild it from the store, then call again
--         {1, product, now, stock left, {stream entry id of each purchase, ...}, outcome, ...} with an outcome for each buyer:
--                         the number of its purchase, or 0 has one already, -1 sold out, -2 not active, or for an attempt that
--                         is one too many 'user:' or 'address:' and the milliseconds to wait
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local stamp = string.format('%.0f', now)
-- Counts an attempt, and returns the answer to one that is one too many.
local function refuse_attempt(buyer, user_limit, address)
  if address ~= '' then
    local limit, burst = string.match(address, '^(%d+):(%d+):')
    local wait = count_address('sale:{_address}:' .. address, tonumber(limit), tonumber(burst), now)
    if wait > 0 then return 'address:' .. wait end
  end
  if user_limit ~= '0' then
    local wait = count_user('sale:{_user}:' .. user_limit .. ':' .. buyer, tonumber(user_limit), now)
    if wait > 0 then return 'user:' .. wait end
  end
end
local replies, place = {}, 2
for i, key in ipairs(KEYS) do
  local count = tonumber(ARGV[place])
  local config = redis.call('HMGET', key .. ':config', 'run', 'id', 'startTime', 'endTime', 'sku')
  if config[1] ~= run then
    replies[i] = {0}
  else
    local state, reason = redis.call('GET', key .. ':state'), redis.call('GET', key .. ':end_reason')
    local stock = tonumber(redis.call('GET', key .. ':stock'))
    local number = tonumber(redis.call('GET', key .. ':seq') or 0)
    local before, last = state, number
    local starts_at, ends_at = tonumber(config[3]), tonumber(config[4])
    local function advance()
      if state == 'ENDED' then
        return
      elseif stock <= 0 then
        state, reason = 'ENDED', 'SOLD_OUT'
      elseif now >= ends_at then
        state, reason = 'ENDED', 'TIME_EXPIRED'
      elseif now >= starts_at then
        state = 'ACTIVE'
      end
    end
    advance()
    local reply, entries = {1, config[2], stamp, 0, {}}, {}
    local buyers, stream = key .. ':buyers', key .. ':stream'
    local is_done, problem = pcall(function()
      for n = 1, count do
        local at = place + 3 * n - 2
        local buyer, answer = ARGV[at], 0
        local refusal = refuse_attempt(buyer, ARGV[at + 1], ARGV[at + 2])
        if refusal then
          answer = refusal
        elseif state == 'ACTIVE' then
          local next_number = string.format('%d', number + 1)
          if redis.call('HSETNX', buyers, buyer, next_number .. ':' .. stamp) == 1 then
            number, stock = number + 1, stock - 1
            answer = number
            advance()
            entries[#entries + 1] = redis.call('XADD', stream, '*', 'product', config[2], 'user', buyer, 'number', next_number,
              'at', stamp)
          end
        elseif redis.call('HEXISTS', buyers, buyer) == 0 then
          answer = state == 'ENDED' and reason == 'SOLD_OUT' and -1 or -2
        end
        reply[5 + n] = answer
      end
    end)
    -- Also after a failure: units that were sold must be counted.
    if number > last then
      redis.call('SET', key .. ':stock', stock)
      redis.call('SET', key .. ':seq', number)
    end
    if not is_done then error(problem) end
    reply[4], reply[5] = stock, entries
    if number > last then
      redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'stock-update', product = config[2],
        data = {sku = config[5], stock = stock}}))
    end
    if state ~= before then
      redis.call('SET', key .. ':state', state)
      local data = {sku = config[5], state = state}
      if state == 'ENDED' then
        redis.call('SET', key .. ':end_reason', reason)
        data.reason = reason
      end
      redis.call('PUBLISH', 'sale:events', cjson.encode({event = 'state-change', product = config[2], data = data}))
    end
    replies[i] = reply
  end
  place = place + 1 + 3 * count
end
return replies
