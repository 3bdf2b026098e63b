-- Caches requests, unless they have changed since they were read: the marker of a change lasts longer than a read takes.
-- KEYS    RequestStatus:<requestId> ...
-- ARGV    1 how long to cache them, in milliseconds, then for each key the encoded request
-- Reply   for each key 1
local replies = {}
for i, key in ipairs(KEYS) do
  redis.call('SET', key, ARGV[1 + i], 'NX', 'PX', ARGV[1])
  replies[i] = 1
end
return replies
