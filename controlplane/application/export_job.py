"""Makes an export: reads the log in order, writes parts, and signs the manifest after each.

Beside each part of an export without filters lie the attempts of its requests, a request a line::

    attempts-00001.jsonl    [12,[["req-9f…",0,1,"n1","r1","ok","",0,8,0.5,1700000000.1,200.0]]]

What it reads it also checks. A record whose leaf is not the one in the sealed tree, or a chain that
does not hold, ends the export with IntegrityError: nothing damaged leaves with a good signature.
"""

from collections.abc import Iterator
from hashlib import sha256

import msgspec

from controlplane.application.export_scan import (
    Scan,
    Source,
    WithAttempts,
    chain_at,
    start_of,
)
from controlplane.application.exports import (
    CHECKPOINTS,
    KEYS,
    MANIFEST,
    PART_ROWS,
    POSITION,
    VERSION,
    Destination,
    ExportError,
    File,
    Filters,
    Format,
    Manifest,
    Part,
    SignedManifest,
    attempts_bytes,
    attempts_name,
    manifest_bytes,
    read_manifest,
)
from controlplane.application.merkle import Frontier
from controlplane.application.notes import NoteError, Signer, join_notes, sign


class ExportJob:
    """``run(upto)`` adds what is missing up to that position, in parts; again, to go on."""

    def __init__(
        self,
        source: Source,
        form: Format,
        filters: Filters,
        destination: Destination,
        part_rows: int = PART_ROWS,
        formula_safe: bool = True,
    ) -> None:
        self._source, self._form, self._filters = source, form, filters
        self._destination, self._part_rows = destination, part_rows
        self.manifest = self._resumed() or self._fresh(formula_safe)
        if self.manifest.formula_safe != formula_safe:
            raise ExportError("The export there was begun with another choice about formulas.")

    def run(self, upto: int | None = None) -> Iterator[Part]:
        """Each part as it is written. ``upto`` None: as far as was meant when it was begun, else
        to the end of the log as it is now."""
        done = self.manifest
        if upto is None:
            upto = done.target if done.target > done.upto else self._source.records.head().position
        scan = Scan(
            self._source, self._filters, chain_at(self._source, done.upto), done.rows, done.upto
        )
        tree = done.tree
        while scan.position < upto:
            part = self._part(scan, upto, tree)
            if part is not None:
                yield part
        if (self.manifest.upto, self.manifest.complete) != (scan.position, True):
            self._write(self._progress(scan, upto, tree, ()))

    def _part(self, scan: Scan, upto: int, tree: Frontier) -> Part | None:
        pieces, first, last, count, first_row = [self._form.start()], 0, 0, 0, scan.number + 1
        for rows in scan.rows(upto, self._part_rows):
            if rows:
                pieces.append(self._form.rows(rows))
                first, last = first or rows[0][POSITION], rows[-1][POSITION]
                count += len(rows)
                tree.extend(bytes.fromhex(row[-1]) for row in rows)
        if not count:
            return None
        pieces.append(self._form.end())
        content = b"".join(pieces)
        name = f"part-{len(self.manifest.parts) + 1:05d}.{self._form.name}"
        digest = sha256(content).hexdigest()
        part = Part(name, count, first_row, first, last, len(content), digest)
        self._destination.put(name, content)
        beside = self._attempts(len(self.manifest.parts) + 1, first, last)
        self._write(self._progress(scan, upto, tree, (part,), beside))
        return part

    def _attempts(self, number: int, first: int, last: int) -> tuple[File, ...]:
        """The attempts of a part's requests, in a file beside it; none where there are none."""
        if not isinstance(self._source.records, WithAttempts) or not self._filters.whole:
            return ()
        found = self._source.records.attempts(first - 1, last)
        if not found:
            return ()
        content = attempts_bytes(found)
        name = attempts_name(number)
        self._destination.put(name, content)
        return (File(name, sha256(content).hexdigest()),)

    def _progress(
        self,
        scan: Scan,
        upto: int,
        tree: Frontier,
        parts: tuple[Part, ...],
        beside: tuple[File, ...] = (),
    ) -> Manifest:
        before = self.manifest
        kept = [one for one in before.files if one.name not in (CHECKPOINTS, KEYS)]
        first = before.first_position or (parts[0].first_position if parts else 0)
        return msgspec.structs.replace(
            before,
            upto=scan.position,
            target=upto,
            complete=scan.position >= upto,
            rows=scan.number,
            first_position=first,
            last_position=parts[-1].last_position if parts else before.last_position,
            root=tree.root().hex(),
            peaks=tuple(peak.hex() for peak in tree.peaks),
            parts=before.parts + parts,
            files=(*self._companions(scan.position), *kept, *beside),
        )

    def _companions(self, upto: int) -> tuple[File, ...]:
        """The checkpoints that cover the export so far, and the keys; rewritten with each part."""
        source, notes = self._source, []
        after = self._filters.after
        while batch := source.seals.checkpoints(source.log, after, 500):
            notes += [one.note for one in batch]
            after = batch[-1].checkpoint.size
            if after >= upto:
                break
        keys = dict.fromkeys([*source.seals.public_keys(), source.signer.public.line])
        files = {CHECKPOINTS: join_notes(notes), KEYS: "".join(f"{line}\n" for line in keys)}
        made = []
        for name, text in files.items():
            self._destination.put(name, text.encode())
            made.append(File(name, sha256(text.encode()).hexdigest()))
        return tuple(made)

    def _write(self, manifest: Manifest) -> None:
        self._destination.put(MANIFEST, signed_bytes(manifest, self._source.signer))
        self.manifest = manifest

    def _resumed(self) -> Manifest | None:
        content = self._destination.get(MANIFEST)
        if content is None:
            return None
        try:
            found = read_manifest(content, [self._source.signer.public])
        except NoteError as error:
            raise ExportError(f"What lies there cannot be continued: {error}") from error
        source = self._source
        asked = (source.installation, source.log, self._form.name, self._filters)
        if (found.installation, found.log, found.format, found.filters) != asked:
            raise ExportError("Another export lies there; choose another place.")
        return found

    def _fresh(self, formula_safe: bool) -> Manifest:
        return fresh_manifest(self._source, self._form.name, self._filters, formula_safe)


def fresh_manifest(source: Source, form: str, filters: Filters, formula_safe: bool) -> Manifest:
    """Of an export that has no row yet."""
    return Manifest(
        version=VERSION,
        installation=source.installation,
        log=source.log,
        format=form,
        filters=filters,
        created_at=round(source.clock.now(), 3),
        upto=filters.after,
        target=filters.after,
        complete=False,
        rows=0,
        first_position=0,
        last_position=0,
        root=Frontier().root().hex(),
        peaks=(),
        start=start_of(source, filters.after) if filters.whole else None,
        formula_safe=formula_safe,
        parts=(),
        files=(),
    )


def signed_bytes(manifest: Manifest, signer: Signer) -> bytes:
    return manifest_bytes(SignedManifest(manifest, sign(manifest.text, [signer])))


class FileExport:
    """An export of one part that is streamed and not kept: ``chunks()``, then ``manifest()``."""

    def __init__(
        self, source: Source, form: Format, filters: Filters, upto: int, formula_safe: bool = True
    ) -> None:
        self._source, self._form, self._filters = source, form, filters
        self._upto, self._safe = upto, formula_safe
        self._digest, self._tree, self._size = sha256(), Frontier(), 0
        self._first = self._last = 0
        self.name = f"{source.log}-{filters.after}-{upto}.{form.name}"
        self.content_type = form.content_type

    def chunks(self) -> Iterator[bytes]:
        """The file, a piece for each batch; raises IntegrityError at a damaged record."""
        chain = chain_at(self._source, self._filters.after)
        scan = Scan(self._source, self._filters, chain, 0, self._filters.after)
        yield from self._counted(self._form.start())
        for rows in scan.rows(self._upto, 2**62):
            if rows:
                self._first, self._last = self._first or rows[0][POSITION], rows[-1][POSITION]
                self._tree.extend(bytes.fromhex(row[-1]) for row in rows)
                yield from self._counted(self._form.rows(rows))
        yield from self._counted(self._form.end())

    def _counted(self, chunk: bytes) -> Iterator[bytes]:
        self._digest.update(chunk)
        self._size += len(chunk)
        if chunk:
            yield chunk

    def manifest(self) -> bytes:
        """The signed manifest of what ``chunks`` gave."""
        count, tree = self._tree.size, self._tree
        digest = self._digest.hexdigest()
        part = Part(self.name, count, 1, self._first, self._last, self._size, digest)
        fresh = fresh_manifest(self._source, self._form.name, self._filters, self._safe)
        manifest = msgspec.structs.replace(
            fresh,
            upto=self._upto,
            target=self._upto,
            complete=True,
            rows=count,
            first_position=self._first,
            last_position=self._last,
            root=tree.root().hex(),
            peaks=tuple(peak.hex() for peak in tree.peaks),
            parts=(part,),
        )
        return signed_bytes(manifest, self._source.signer)
