// Viridis, an ordered scale that is told apart with any colour vision and in grey.

const STOPS = [
  [68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140],
  [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37],
];

// Small weights are the common ones: the scale follows the square root.
export function stretch(weight) {
  return Math.sqrt(Math.min(Math.max(weight, 0), 1));
}

// Red, green and blue, from 0 to 255, of a share from 0 to 1.
export function viridis(share) {
  const place = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1);
  const low = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[low].map(
    (value, channel) => value + (place - low) * (STOPS[low + 1][channel] - value),
  );
}

export function drawScale(canvas) {
  const width = 64;
  canvas.width = width;
  canvas.height = 1;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, 1);
  for (let x = 0; x < width; x += 1) {
    pixels.data.set([...viridis(stretch(x / (width - 1))), 255], 4 * x);
  }
  context.putImageData(pixels, 0, 0);
}
