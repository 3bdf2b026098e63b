-- Replaces cached requests that have changed by a marker, an empty string.
-- KEYS    RequestStatus:<requestId> ...
-- ARGV    1 how long the marker lasts, in milliseconds
-- Reply   for each key 1
local marked = {}
for i, key in ipairs(KEYS) do
  redis.call('SET', key, '', 'PX', ARGV[1])
  marked[i] = 1
end
return marked
