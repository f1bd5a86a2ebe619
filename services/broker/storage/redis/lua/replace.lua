-- Replaces lists of chunks of some records, each record as long as it is the given one.
-- KEYS: groups, then the lists, record by record.  ARGV: for each record its name, itself, the number of its lists, and
--   the only chunk of each.
-- Returns for each record whether it was that one. Running it again changes nothing.
local results, list, at = {}, 2, 1
while at <= #ARGV do
  local is_same = redis.call('HGET', KEYS[1], ARGV[at]) == ARGV[at + 1]
  local num_lists = tonumber(ARGV[at + 2])
  for i = 0, num_lists - 1 do
    if is_same then
      redis.call('UNLINK', KEYS[list + i])
      redis.call('RPUSH', KEYS[list + i], ARGV[at + 3 + i])
    end
  end
  results[#results + 1] = is_same and 1 or 0
  list, at = list + num_lists, at + 3 + num_lists
end
return results
