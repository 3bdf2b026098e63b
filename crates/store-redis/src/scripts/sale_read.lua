-- Reads the oldest purchases that the store has to record. They stay in the stream until sale_remove.lua removes them.
-- KEYS    sale:{<sku>} ..., see sale_buy.lua
-- ARGV    1 how many, 2 their minimum age in milliseconds: younger ones are recorded by the server that sold them
-- Reply   for each key a flat list: the length of the stream, then entry id, product, user, number, time, all fields as JSON, ...
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, key in ipairs(KEYS) do
  local flat, until_id = {redis.call('XLEN', key .. ':stream')}, string.format('%.0f', now - tonumber(ARGV[2]))
  local newest = redis.call('XREVRANGE', key .. ':stream', '+', '-', 'COUNT', 1)[1]
  -- With an entry ahead of the clock, which was set back, ages are unknown: all entries are read.
  if newest and tonumber(string.match(newest[1], '^%d+')) > now then
    until_id = '+'
  end
  for _, entry in ipairs(redis.call('XRANGE', key .. ':stream', '-', until_id, 'COUNT', ARGV[1])) do
    local fields = {}
    for n = 1, #entry[2], 2 do
      fields[entry[2][n]] = entry[2][n + 1]
    end
    for _, value in ipairs({entry[1], fields.product or '', fields.user or '', fields.number or '', fields.at or '',
      cjson.encode(fields)}) do
      flat[#flat + 1] = value
    end
  end
  replies[i] = flat
end
return replies
