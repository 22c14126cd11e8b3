const NUM_COLORS = 8;

/** One colour per model version: by rank among all versions placed, so neighbours differ. */
export function versionColors(versionIds: string[]): Map<string, string> {
  const unique = [...new Set(versionIds)].sort();
  return new Map(unique.map((id, rank) => [id, `var(--cat-${rank % NUM_COLORS})`]));
}
