-- Makes decisions about limits, one after the other. Each decision spends all of its keys that bind, or none.
-- KEYS    WeirLimit:<scope>:<policy>:{<key>} ..., each a text "<rule> <a> <b> <c> <w>", written at time w; the rules are
--         B:<refill>:<period>   token bucket: full again at c steps of 2^52 microseconds, plus a microseconds and b parts (refill
--                               parts are a microsecond)
--         F:<window>            fixed window: began at a, b were spent in it
--         S:<window>            sliding window: the current one began at a, b were spent in it and c in the one before
-- ARGV    1 now in microseconds ('' = TIME), then for each decision the operation (take, peek, charge, give or forget), the number
--         of its keys, and for each key
--         1. words ('-' = none): rule; cost; limit (windows only); the time in which the bucket regains the cost; then the time in
--            which it regains what may be spent and still leave room for the cost ('-' = the cost never fits), each in
--            microseconds and parts; the steps of 2^52 microseconds of both times; taken at; 1 if the key can deny; 1 to merge the caller's state with the stored one; 1 if 3 and 4 follow
--         2. the caller's state ("a b c w" by its own clock, '' = none)
--         3. the text that is expected to be stored, written under another rule
--         4. the state that replaces it
-- Reply   {now, d ...} with for each decision one of
--         {1 = allowed or 0 = denied, then for each key: 1 if taken, a, b, c}
--         {-1, the stored text of each key}   a key was spent under another rule
--         {error}                             the decision failed
-- Every number is whole and below 2^53, so nothing is rounded.
local STEP, MOST = 4503599627370496, 4294967295
local is_test = ARGV[1] ~= ''
local now
if is_test then
  now = tonumber(ARGV[1])
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- Multiplies numbers below 2^32 and 2^45. Returns three parts, the most significant first.
local function product(a, b)
  local low = a * (b % 65536)
  local middle = a * (math.floor(b / 65536) % 65536) + math.floor(low / 65536)
  local high = a * math.floor(b / 4294967296) + math.floor(middle / 65536)
  return high, middle % 65536, low % 65536
end

-- Returns whether a * b <= c * d.
local function is_up_to(a, b, c, d)
  local h1, m1, l1 = product(a, b)
  local h2, m2, l2 = product(c, d)
  if h1 ~= h2 then return h1 < h2 end
  if m1 ~= m2 then return m1 < m2 end
  return l1 <= l2
end

-- Brings a state to the present: a full bucket is full now, a window that has ended is empty.
local function advance(p)
  local span = p.ask.span
  if p.ask.kind == 'B' then
    if p.c == 0 and p.a < now then p.a, p.b = now, 0 end
  elseif p.ask.kind == 'F' then
    if now - p.a >= span or p.b == 0 then p.a, p.b = now, 0 end
  else
    local start = now - now % span
    if start > p.a then
      p.c = start == p.a + span and p.b or 0
      p.a, p.b = start, 0
    end
  end
end

local function has_room(p)
  local ask = p.ask
  if ask.cost == 0 then return true end
  if ask.kind == 'B' then
    if not ask.others then return false end
    local missing, steps = p.a - now, p.c
    if missing < 0 then missing, steps = missing + STEP, steps - 1 end
    if steps ~= ask.other_steps then return steps < ask.other_steps end
    return missing < ask.others or (missing == ask.others and p.b <= ask.other_parts)
  elseif ask.kind == 'F' then
    return ask.cost <= ask.limit - p.b
  end
  local rest = ask.limit - p.b - ask.cost
  local into = math.min(math.max(now - p.a, 0), ask.span)
  return rest >= 0 and is_up_to(p.c, ask.span - into, rest, ask.span)
end

local function charge(p)
  local ask = p.ask
  if ask.cost == 0 then return end
  if ask.kind == 'B' then
    p.a, p.b, p.c = p.a + ask.whole, p.b + ask.parts, math.min(p.c + ask.steps, MOST)
    if p.b >= ask.refill then p.a, p.b = p.a + 1, p.b - ask.refill end
    if p.a >= STEP then p.a, p.c = p.a - STEP, p.c + 1 end
  else
    p.b = math.min(p.b + ask.cost, MOST)
  end
end

local function give(p)
  local ask = p.ask
  local taken_at, span = ask.taken_at, ask.span
  if ask.kind == 'B' then
    p.a, p.b, p.c = p.a - ask.whole, p.b - ask.parts, p.c - ask.steps
    if p.b < 0 then p.a, p.b = p.a - 1, p.b + ask.refill end
    if p.a < 0 then p.a, p.c = p.a + STEP, p.c - 1 end
    if p.c < 0 or (p.c == 0 and p.a < now) then p.a, p.b, p.c = now, 0, 0 end
  elseif ask.kind == 'F' then
    if not taken_at or taken_at >= p.a then p.b = math.max(p.b - ask.cost, 0) end
  else
    local current = math.min(ask.cost, p.b)
    if taken_at and taken_at < p.a then current = 0 end
    local previous = ask.cost - current
    if taken_at and (taken_at >= p.a or taken_at + span < p.a) then previous = 0 end
    p.b, p.c = p.b - current, math.max(p.c - previous, 0)
  end
end

-- Milliseconds until the key is unspent.
local function until_unspent(p)
  local last, ask = p.a, p.ask
  if ask.kind == 'B' then last = p.a + p.c * STEP elseif ask.kind == 'F' then last = p.a + ask.span else last = p.a + 2 * ask.span end
  return math.max(math.ceil((last - now) / 1000), 0)
end

local function set(p, a, b, c, w)
  p.a, p.b, p.c, p.w = tonumber(a), tonumber(b), tonumber(c), tonumber(w)
  if p.ask.kind == 'B' and p.a >= STEP then p.a, p.c = p.a - STEP, p.c + 1 end
end

local function read(p, state)
  set(p, string.match(state, '(%S+) (%S+) (%S+) ?(%S*)'))
end

-- A state that was written in the future was written before the clock was set back. It is moved back by as much, and saved
-- whatever is decided: otherwise it would count as just written until the clock has caught up.
local function move_back(p)
  local ahead = (p.w or now) - now
  if ahead <= 0 then return end
  p.is_new = true
  p.a = p.a - ahead
  if p.ask.kind == 'B' then
    if p.a < 0 then p.a, p.c = p.a + STEP, p.c - 1 end
    if p.c < 0 then p.a, p.b, p.c = now, 0, 0 end
  elseif p.ask.kind == 'S' then
    p.a = p.a - p.a % p.ask.span
  end
end

-- Merges the caller's state into the stored one: the one with more spent wins.
local function merge(p, state)
  local a, b, c = p.a, p.b, p.c
  read(p, state)
  move_back(p)
  if p.ask.kind == 'B' then
    local is_more = a > p.a or (a == p.a and b > p.b)
    if c ~= p.c then is_more = c > p.c end
    if is_more then p.a, p.b, p.c = a, b, c end
  elseif p.a ~= a then
    if a > p.a then p.a, p.b, p.c = a, b, c end
  else
    p.b, p.c = math.max(p.b, b), math.max(p.c, c)
  end
end

local function save(p)
  local ms = math.min(math.max(until_unspent(p), p.before) + 1000, 100000000000)
  -- A test's clock is unrelated to Redis's time, by which keys expire.
  if is_test then ms = 86400000 end
  redis.call('SET', p.key, string.format('%s %d %d %d %d', p.ask.rule, p.a, p.b, p.c, now), 'PX', string.format('%d', ms))
end

-- The decisions of a batch often have the same words for different keys: each text is parsed once.
local asks = {}
local function ask_of(text)
  local ask = asks[text]
  if not ask then
    local words = {}
    for word in string.gmatch(text, '%S+') do words[#words + 1] = word end
    ask = { rule = words[1], kind = string.sub(words[1], 1, 1), cost = tonumber(words[2]), limit = tonumber(words[3]),
      whole = tonumber(words[4]), parts = tonumber(words[5]), others = tonumber(words[6]), other_parts = tonumber(words[7]),
      steps = tonumber(words[8]), other_steps = tonumber(words[9]), taken_at = tonumber(words[10]), binds = words[11] == '1',
      counts = words[12] == '1', adopts = words[13] == '1' }
    if ask.kind == 'B' then
      ask.refill = tonumber(string.match(ask.rule, '^B:(%d+)'))
    else
      ask.span = tonumber(string.sub(ask.rule, 3))
    end
    asks[text] = ask
  end
  return ask
end

-- Loads a key with the arguments after `at`. Returns its present state, the stored text, and whether that was written under
-- another rule.
local function load(key, at)
  local ask, known = ask_of(ARGV[at + 1]), ARGV[at + 2]
  local p = { key = key, ask = ask, a = 0, b = 0, c = 0 }
  local stored, differs = redis.call('GET', key), false
  if not stored then
    if known ~= '' then
      read(p, known)
      move_back(p)
    end
  elseif ask.adopts and stored == ARGV[at + 3] then
    read(p, ARGV[at + 4])
    p.is_new = true
  else
    local rule, a, b, c, w = string.match(stored, '^(%S+) (%S+) (%S+) (%S+) ?(%S*)')
    differs = rule ~= ask.rule
    if not differs then
      set(p, a, b, c, w)
      move_back(p)
    end
  end
  if ask.counts and known ~= '' and not differs then merge(p, known) end
  return p, stored or '', differs
end

-- Makes one decision about `count` keys from KEYS[first], with the arguments after `at`.
local function decide(mode, count, first, at)
  local parts, here, differs = {}, { -1 }, false
  for i = 1, count do
    local p, stored, is_other = load(KEYS[first + i - 1], at)
    parts[i], here[i + 1], differs = p, stored, differs or is_other
    at = at + (p.ask.adopts and 4 or 2)
  end
  if differs then return here end
  local allowed = true
  for _, p in ipairs(parts) do
    p.before = until_unspent(p)
    advance(p)
    if mode == 'take' and p.ask.binds and not has_room(p) then allowed = false end
  end
  local reply = { allowed and 1 or 0 }
  for _, p in ipairs(parts) do
    local taken = 0
    if mode == 'take' and allowed and has_room(p) then
      charge(p)
      taken = 1
    elseif mode == 'charge' then
      charge(p)
    elseif mode == 'give' then
      give(p)
    elseif mode == 'forget' then
      p.a, p.b, p.c = 0, 0, 0
    end
    -- A state that was converted from another rule or moved back by `move_back` is saved even if the decision is a denial.
    if (p.is_new and mode ~= 'peek') or mode == 'charge' or mode == 'give' or mode == 'forget' or (taken == 1 and p.ask.cost > 0) then
      save(p)
    end
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = taken, p.a, p.b, p.c
  end
  return reply
end

local replies, first, at = { now }, 1, 1
while first <= #KEYS do
  local mode, count = ARGV[at + 1], tonumber(ARGV[at + 2])
  -- A decision that fails, such as on a key of another type, must not fail the others.
  local is_done, reply = pcall(decide, mode, count, first, at + 2)
  replies[#replies + 1] = is_done and reply or {tostring(type(reply) == 'table' and reply.err or reply)}
  first, at = first + count, at + 2
  for _ = 1, count do at = at + (ask_of(ARGV[at + 1]).adopts and 4 or 2) end
end
return replies
