-- Deletes a user's hash because the user has new limits.
-- KEYS    1 RateLimiterCache:<userId>
-- ARGV    1 run id of this Redis, 2 when the window of the new limits began
-- Reply   {1}; a hash that is of that window already is left
if redis.call('HGET', KEYS[1], 'window') ~= ARGV[2] then
  redis.call('DEL', KEYS[1])
end
return {1}
