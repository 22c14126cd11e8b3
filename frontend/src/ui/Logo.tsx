/** Three trays of a rack, one half full. */
export function Logo({ size = 18 }: { size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 18 18" aria-hidden="true" fill="var(--accent)">
      <rect x="0" y="1" width="18" height="4" rx="1" />
      <rect x="0" y="7" width="11" height="4" rx="1" />
      <rect x="12.5" y="7" width="5.5" height="4" rx="1" opacity="0.35" />
      <rect x="0" y="13" width="18" height="4" rx="1" />
    </svg>
  );
}
