-- Keeps what was read of requests, unless they have changed since: a change leaves its mark for longer than a read takes.
-- KEYS    RequestStatus:<requestId> for each
-- ARGV    1 milliseconds to keep it for, then the text of each
-- Reply   1 for each
local kept = {}
for i, key in ipairs(KEYS) do
  redis.call('SET', key, ARGV[1 + i], 'NX', 'PX', ARGV[1])
  kept[i] = 1
end
return kept
