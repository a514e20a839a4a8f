() => {  // what is wrong with the layout of a page: tests/browser.py, layout_faults
  const faults = [], wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) faults.push(`${wide} pixels in ${innerWidth}`);
  const pinned = node => { for (; node; node = node.parentElement) if (/sticky|fixed/.test(getComputedStyle(node).position)) return true; return false };
  // What a box that scrolls hides is not seen.
  const clipped = (rect, node) => {
    let {left, top, right, bottom} = rect;
    for (; node; node = node.parentElement) if (getComputedStyle(node).overflowX !== "visible" && node.tagName !== "svg") {
      const box = node.getBoundingClientRect();
      left = Math.max(left, box.left); right = Math.min(right, box.right); top = Math.max(top, box.top); bottom = Math.min(bottom, box.bottom);
    }
    return {left, top, right, bottom};
  };
  const seen = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || /^(SCRIPT|STYLE|OPTION|TITLE|TEMPLATE)$/i.test(parent.tagName) || !parent.checkVisibility({visibilityProperty: true, opacityProperty: true}) || pinned(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const rects = parent.namespaceURI.endsWith("svg") ? [parent.getBoundingClientRect()] : [...range.getClientRects()];
    for (const rect of rects) {
      const {left, top, right, bottom} = clipped(rect, parent);
      if (right - left > 2 && bottom - top > 2) seen.push({left, top, right, bottom, node, text: node.textContent.trim().slice(0, 40)});
    }
  }
  seen.sort((a, b) => a.top - b.top);
  seen.forEach((a, i) => {
    for (let j = i + 1; j < seen.length && seen[j].top < a.bottom - 3; j++) {
      const b = seen[j];
      if (a.node !== b.node && Math.min(a.bottom, b.bottom) - b.top > 3 && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2) faults.push(`"${a.text}" over "${b.text}"`);
    }
  });
  const inside = node => { const box = node.getBoundingClientRect(); return box.width > 0 && box.top >= 0 && box.top < innerHeight && box.bottom <= innerHeight };
  const headlines = [...document.querySelectorAll("h1, .headline")];
  if (!headlines.some(inside)) faults.push("no headline on the first screen");
  // Half of it at least, and larger than an icon.
  const pictured = node => { const box = node.getBoundingClientRect(); return box.width > 150 && box.height > 60 && (box.top + box.bottom) / 2 < innerHeight };
  if (![...document.querySelectorAll("svg, canvas, img")].some(pictured)) faults.push("no picture on the first screen");
  return faults;
}
