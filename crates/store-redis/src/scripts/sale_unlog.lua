-- Removes the events of a deleted product from the log of sale_log.lua, so that no server sends them again.
-- KEYS    sale:{_events}, see sale_log.lua
-- ARGV    1 the product
-- Reply   for the key how many events were removed
local log_key, removed = KEYS[1] .. ':log', 0
for _, entry in ipairs(redis.call('LRANGE', log_key, 0, -1)) do
  if string.match(entry, '^%d+ (%S+) ') == ARGV[1] then
    removed = removed + redis.call('LREM', log_key, 1, entry)
  end
end
redis.call('DEL', KEYS[1] .. ':product:' .. ARGV[1])
return {removed}
